"""``veilboost dossier`` and ``veilboost verify`` on what it wrote, from the command line."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from dp_components.events import GaussianEvent, NeighbouringRelation, Release
from dp_components.ledger import Budget, Ledger, LedgerIdentity
from nvflare_plugins.cli.main import main
from nvflare_plugins.dossier import attacks as membership
from nvflare_plugins.dossier import attacks as statistics
from nvflare_plugins.dossier.archive import pack, unpack
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.site.policy import SitePolicy
from tests.support.sessions import Authority
from tests.unit.nvflare_plugins.cli.conftest import PROJECT

PARTS = {
    "manifest.json",
    "signature.json",
    "index.html",
    "attacks.html",
    "attacks.json",
    "structure.html",
    "structure.json",
    "data_protection.html",
    "report.html",
    "threats.json",
    "models.json",
    "bom.cdx.json",
    "run.json",
}


@pytest.fixture(autouse=True)
def _few_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "N_REFERENCES", 2)
    monkeypatch.setattr(statistics, "_RESAMPLINGS", 20)


def write(run: Path, *options: str) -> Path:
    path = run.parents[1] / "dossier.zip"
    assert main(["dossier", str(run), "--out", str(path), *options]) == 0
    return path


def test_it_holds_all_that_the_site_has_and_verify_accepts_it(run: Path, kit: Path, capsys) -> None:
    path = write(run)
    said = capsys.readouterr().out
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    members = unpack(path.read_bytes())
    assert set(members) == PARTS | {"policy.json", "evidence/site-1.evidence.jsonl"}
    assert "missing What veilboost verify says" in said and "none    Privacy ledger" in said
    cover = members["index.html"].decode()
    assert "dossier signed" in cover and "one log alone can be compared with nothing" in cover
    attacks = json.loads(members["attacks.json"])
    assert attacks["not_run"] is None and len(attacks["model"]) == 2 and attacks["bound"] is None
    for arguments, code in (([], 3), (["--root-ca", str(kit)], 0), (["--root-ca", str(kit), "--job", "job"], 0)):
        assert main(["verify", str(path), *arguments]) == code
    assert capsys.readouterr().out.splitlines()[-1] == "VERIFIED: dossier of job job by site-1"
    assert main(["verify", str(path), "--root-ca", str(kit), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dossier"]["verdict"] == "VERIFIED"
    assert main(["verify", str(path), "--root-ca", str(kit), "--job", "other"]) == 1
    assert "is of job job, not of other" in capsys.readouterr().err


def test_the_same_dossier_twice_has_the_same_pages(run: Path) -> None:
    first, second = (unpack(write(run).read_bytes()) for _ in range(2))
    timed = {"manifest.json", "bom.cdx.json", "index.html"}
    assert list(first) == list(second)
    assert all(first[name] == second[name] for name in first if name not in timed)


def test_evidence_of_all_parties_is_checked_when_it_is_written_and_when_it_is_read(run: Path, capsys) -> None:
    path = write(run, "--no-attacks", "--evidence", str(run.parents[1] / "server"))
    members = unpack(path.read_bytes())
    assert [name for name in members if name.startswith("evidence/")] == [
        f"evidence/{party}.evidence.jsonl" for party in ("site-1", "server", "site-2", "site-3")
    ]
    assert json.loads(members["verification.json"])["verdict"] == "UNSIGNED"
    assert "asked for none" in json.loads(members["attacks.json"])["not_run"]
    capsys.readouterr()
    assert main(["verify", str(path)]) == 2
    said = capsys.readouterr().out
    assert "The evidence in it:" in said and said.splitlines()[-1].startswith("UNSIGNED: the dossier of job job")
    # Who packs it anew, unsigned, with a log that he has changed, is noticed by the evidence itself.
    log = "evidence/site-2.evidence.jsonl"
    changed = members[log].replace(b'"size":1', b'"size":2', 1)
    assert changed != members[log]
    path.write_bytes(_packed_anew({**members, log: changed}))
    assert main(["verify", str(path)]) == 1
    assert "it says that its evidence holds, and that does not" in capsys.readouterr().err


def _packed_anew(members: dict[str, bytes]) -> bytes:
    """Return an unsigned archive as a forger would make it."""
    from nvflare_plugins.dossier.archive import MANIFEST, SIGNATURE, Dossier, seal
    from nvflare_plugins.evidence.format import read_time
    from nvflare_plugins.site.certificates import Identity

    stated = json.loads(members[MANIFEST])
    facts = {key: stated[key] for key in ("job_id", "attempt", "site", "profile")}
    inner = {name: content for name, content in members.items() if name not in (MANIFEST, SIGNATURE)}
    made = Dossier(**facts, created=read_time(stated["created"]), members=inner, is_signed=False)
    return seal(made, Identity.unsigned("site-1"))


def test_what_was_changed_is_named_and_foreign_roots_are_refused(run: Path, kit: Path, tmp_path, capsys) -> None:
    path = write(run, "--no-attacks")
    members = unpack(path.read_bytes())
    other = tmp_path / "other"
    other.mkdir()
    (other / "rootCA.pem").write_bytes(Authority(101, "project").root.public_bytes(Encoding.PEM))
    capsys.readouterr()

    def refused(content: bytes, words: str, root: Path = kit) -> None:
        archive = tmp_path / "changed" / "dossier.zip"
        archive.parent.mkdir(exist_ok=True)
        archive.write_bytes(content)
        assert main(["verify", str(archive), "--root-ca", str(root), "--server", "server1"]) == 1
        error = capsys.readouterr().err
        assert words in error and len(error.splitlines()) == 1, error

    refused(pack({**members, "attacks.json": b"{}"}), "member attacks.json was changed")
    refused(pack({name: one for name, one in members.items() if name != "attacks.html"}), "attacks.html is missing")
    refused(path.read_bytes(), "does not lead to this project's root", other / "rootCA.pem")
    refused(path.read_bytes()[:-1], "no dossier as VeilBoost writes it")
    refused(_packed_anew(members), "is not signed by site-1")
    assert main(["verify", str(path), str(path)]) == 1
    assert "checked by itself" in capsys.readouterr().err


def test_the_ledger_shows_this_jobs_events_and_gives_the_attacks_their_bound(run: Path, capsys) -> None:
    record = RunRecord.read(run)
    replace(record, profile="dp_distributed").write(run)
    policy = SitePolicy.load(run.parents[1], "site-1")
    row = NeighbouringRelation.ADD_OR_REMOVE_ROW
    event = GaussianEvent(10.0, row)
    ledger = Ledger.open(policy.ledgers, LedgerIdentity("site-1", "train", row), Budget(2, 1e-5), policy.ledger_heads)
    for job in ("job", "another-job"):
        ledger.open_job(job, event)
        ledger.release(job, "sums", lambda: Release(np.array([1]), event))
    ledger.close_job("another-job")
    members = unpack(write(run).read_bytes())
    [shown] = json.loads(members["ledger.json"])
    assert [job["is_this_job"] for job in shown["jobs"]].count(True) == 1 and len(shown["jobs"]) == 2
    assert b"another-job" not in b"".join(members.values())
    assert [job.get("events", [{}])[0].get("event") for job in shown["jobs"] if job["is_this_job"]] != [None]
    bound = json.loads(members["attacks.json"])["bound"]
    assert 0.5 < bound["area"] < 0.55 and "ledger" in bound["source"]
    assert "Privacy ledger of train" in members["index.html"].decode()


def test_a_policy_that_was_not_kept_is_said_to_be_gone(run: Path) -> None:
    (run / "policy.json").unlink()
    assert "policy.json" in unpack(write(run, "--no-attacks").read_bytes()), "it has not changed since"
    policy = run.parents[1] / "local" / "veilboost.json"
    policy.write_text(json.dumps({**json.loads(policy.read_text()), "min_sites": 7}))
    members = unpack(write(run, "--no-attacks").read_bytes())
    assert "policy.json" not in members and "the policy has changed since" in members["index.html"].decode()
    (run / "policy.json").write_text("{}")
    cover = unpack(write(run, "--no-attacks").read_bytes())["index.html"].decode()
    assert "is not the one whose hash was recorded" in cover


def test_a_part_of_a_vertical_model_is_committed_to_and_never_hashed_bare(run: Path) -> None:
    (run / "model.json").unlink()
    (run / "private_table.json").write_text('{"thresholds": [1.5]}')
    first, second = (unpack(write(run).read_bytes()) for _ in range(2))
    [stated] = json.loads(first["models.json"])
    assert "sha256" not in stated and len(stated["commitment"]) == 64 and first["models.json"] == second["models.json"]
    assert stat.S_IMODE(os.stat(run / "dossier.salt").st_mode) == 0o600
    assert b"1.5" not in first["models.json"]
    assert "its own part of a vertical model" in json.loads(first["attacks.json"])["not_run"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: (run / "model.json").unlink(), "has left no model"),
        (lambda run: (run / "model.json").write_text("{"), "no JSON model of XGBoost"),
        (lambda run: (run.parents[1] / "test.csv").unlink(), "has no file at its path"),
        (lambda run: replace(RunRecord.read(run), data=()).write(run), "no training rows"),
        (lambda run: replace(RunRecord.read(run), data=RunRecord.read(run).data[:1]).write(run), "--held-out NAME"),
    ],
)
def test_why_no_attack_was_run_stands_on_the_page(run: Path, change, words: str) -> None:
    change(run)
    members = unpack(write(run).read_bytes())
    reason = json.loads(members["attacks.json"])["not_run"]
    assert words in reason and str(run.parents[1]) not in b"".join(members.values()).decode()
    assert "not run" in members["attacks.html"].decode() and "not run: " in members["index.html"].decode()


def test_mistakes_are_named(run: Path, capsys) -> None:
    own, out = run.parents[1], ["--out", str(run / "x.zip")]

    def refused(*arguments: str) -> str:
        assert main(["dossier", *arguments, *out]) == 1
        assert not (run / "x.zip").exists()
        return capsys.readouterr().err

    assert "--workspace DIR --site NAME" in refused("job")
    assert "holds no run.json" in refused("other", "--workspace", str(own), "--site", "site-1")
    assert "--root-ca needs --evidence" in refused(str(run), "--root-ca", "rootCA.pem")
    assert "no such file or folder" in refused(str(run), "--evidence", str(own / "nowhere"))
    assert main(["dossier", "job", "--workspace", str(own), "--site", "site-1", "--no-attacks", *out]) == 0
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "params": 3, "settings": 3}))
    (run / "x.zip").unlink()
    assert "damaged" in refused(str(run))


def test_a_kit_of_another_site_or_one_that_has_expired_is_refused(run: Path, kit: Path, capsys) -> None:
    startup, path = run.parents[1] / "startup", str(run / "x.zip")
    for certificate, words in (
        (PROJECT.issue("site-2", 1), "startup kit is that of site-2"),
        (PROJECT.issue("site-1", 1, days=(-3, -2)), "nobody would believe"),
    ):
        (startup / "client.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
        assert main(["dossier", str(run), "--no-attacks", "--out", path]) == 1
        assert words in capsys.readouterr().err and not Path(path).exists()


def test_a_dossier_takes_the_place_of_no_other_file(run: Path, capsys) -> None:
    (run / "folder.zip").mkdir()
    before = (run / "run.json").read_bytes()
    for name, words in (("run.json", "must end in .zip"), ("no/x.zip", "make it first"), ("folder.zip", "is a folder")):
        assert main(["dossier", str(run), "--no-attacks", "--out", str(run / name)]) == 1
        assert words in capsys.readouterr().err
    assert (run / "run.json").read_bytes() == before
