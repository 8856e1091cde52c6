"""A model is trained again without persons: what it equals, when it may be, and what becomes of the requests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import REGISTRY_TEXT, ROWS_TEXT, DataRefusal
from nvflare_plugins.cli.main import main
from nvflare_plugins.evidence.verification import find_evidence, verify
from nvflare_plugins.flare.kinds import KINDS, read_job
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.recipes import HorizontalXGBRecipe
from nvflare_plugins.site.memory.forgetting import Forgetting, Standing
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.envelope import Kind, unpack
from tests.conformance.kind_cases import CASES
from tests.support import survival
from tests.support.examples import quick
from tests.support.federation import Federation, Parties, dies_at, succeed
from tests.support.horizontal_jobs import job as any_job
from tests.support.horizontal_jobs import spaced, table
from tests.support.private_federation import BUDGET, DATA, PrivateFederation, frame_of, job_of

POLICY = {
    "min_effective_rows": 100,
    "min_rows_per_node": 4,
    "consents": {"plain_profile": True},
    "share_data_errors": False,
}
N_SITE, N_GONE = 800, 400


def job(params: dict | None = None, num_rounds: int = 2, **fields: object) -> HorizontalJob:
    return spaced(params, num_rounds, **fields)


def frame(n: int = 3 * N_SITE, seed: int = 0) -> pd.DataFrame:
    return table(n, seed=seed).assign(person=[f"P{seed}-{i:05}" for i in range(n)])


def federation_of(folder: Path, rows: pd.DataFrame, **policy: object) -> Federation:
    federation = Federation(folder, policy={**POLICY, **policy})
    give(federation, dict(zip(federation.sites, np.array_split(np.arange(len(rows)), 3), strict=True)), rows)
    return federation


def give(federation: Federation, parts: dict[str, np.ndarray], rows: pd.DataFrame, name: str = "train") -> None:
    for site, places in parts.items():
        federation.give(site, name, rows.iloc[places], id="person")


def forgetting(federation: Parties, site: str) -> Forgetting:
    return Forgetting(SitePolicy.load(federation.workspace(site), site))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Return sites with the rows of ``frame`` that have trained job august on them; each test has a copy."""
    federation = federation_of(tmp_path_factory.mktemp("trained"), frame())
    succeed(federation.run(SEARCHING, "august"))
    return federation


def ask(federation: Federation, rows: pd.DataFrame, counts: tuple[int, ...], first: int = 0) -> pd.DataFrame:
    """Queue persons at each site, some in a row; return the rows of all others."""
    gone = []
    for site, places, n in zip(federation.sites, np.array_split(np.arange(len(rows)), 3), counts, strict=True):
        gone += [*places[first : first + n]]
        forgetting(federation, site).add("train", list(rows.person.iloc[places[first : first + n]]))
    return rows.drop(index=gone)


def standing(federation: Federation, site: str) -> dict[Standing, int]:
    found, times = np.unique(forgetting(federation, site).queue("train").standing, return_counts=True)
    return {Standing(one): int(n) for one, n in zip(found, times, strict=True)}


def trained_on(folder: Path, rows: pd.DataFrame, training: HorizontalJob, parts: list[np.ndarray]) -> bytes:
    """Return the model of sites whose files never held other rows."""
    other = Federation(folder, policy=POLICY)
    give(other, dict(zip(other.sites, parts, strict=True)), rows)
    succeed(other.run(training, "never"))
    return other.model("never")


def parts_of(rows: pd.DataFrame, kept: pd.DataFrame) -> list[np.ndarray]:
    """Return the places in ``kept`` of what each site has left."""
    site_of = np.repeat(np.arange(3), N_SITE)[: len(rows)]
    left = site_of[rows.index.get_indexer(kept.index)]
    return [np.flatnonzero(left == number) for number in range(3)]


SEARCHING = any_job(num_rounds=2)
TRAININGS = {
    "masks": any_job(num_rounds=3),
    "plain": any_job(num_rounds=3, profile="plain"),
    "bfv": job(num_rounds=1, profile="bfv"),
    "ckks": job(num_rounds=1, profile="ckks"),
    "cox": HorizontalJob("train", survival.FORMS["events"], {"objective": "survival:cox", "max_depth": 2}, 2),
}


@pytest.mark.parametrize("name", quick(TRAININGS, "masks", "bfv", "cox"))
def test_the_model_is_that_of_training_without_them_byte_for_byte(tmp_path: Path, name: str) -> None:
    rows, training = frame(), TRAININGS[name]
    if name == "cox":
        rows = survival.times("events", len(rows)).assign(person=rows.person)
    consents = {**POLICY["consents"], "recompute_with_changes": name == "cox"}  # whose rows are never counted so
    federation = federation_of(tmp_path / "a", rows, consents=consents)
    succeed(federation.run(training, "august"))
    kept = ask(federation, rows, (N_GONE,) * 3)
    succeed(federation.run(replace(training, forgets="august"), "again"))
    expected = trained_on(tmp_path / "b", kept, training, parts_of(rows, kept))
    assert federation.model("again") == expected != federation.model("august")
    assert standing(federation, "site-2") == {Standing.FORGOTTEN: N_GONE}
    assert forgetting(federation, "site-1").replaced() == {"august": "again"}
    record = federation.record("site-1", "again")
    assert f"{N_GONE} persons" in " ".join(record.notes)
    assert ("recompute_with_changes" in record.consents) is (name == "cox")
    assert forgetting(federation, "site-1").queue("train").batches[0].rows == N_GONE


def refused(federation: Federation, training: HorizontalJob, name: str, **options: object) -> None:
    """Run a job that ends at all sites, by a site's registry, before anything but counts has left."""
    frames: list = []
    outcomes = federation.run(training, name, frames=frames, **options)
    assert all(isinstance(outcome, Exception) for outcome in outcomes.values())
    assert any(isinstance(o, DataRefusal) and str(o) == REGISTRY_TEXT for o in outcomes.values())
    assert not {unpack(frame).kind for _, frame in frames} & {Kind.CUT_COUNTS, Kind.HISTOGRAM, Kind.ROOT_SUM}


SMALL = {
    "one person": (1, 0, 0),
    "too few": (333, 333, 333),
    "two sites": (600, 600, 0),
    "one site": (0, 700, 400 - 391),
    "a third site whose rows the others would see": (600, 600, 9),
    "too few that stay": (700, 700, 700),
}


@pytest.mark.parametrize("name", SMALL)
def test_smaller_batches_wait(tmp_path: Path, trained: Federation, name: str) -> None:
    rows, federation = frame(), trained.copied(tmp_path)
    ask(federation, rows, SMALL[name])
    refused(federation, replace(SEARCHING, forgets="august"), "again")
    for site, n in zip(federation.sites, SMALL[name], strict=True):
        assert standing(federation, site) == ({Standing.WAITING: n} if n else {})
    if name == "one person":  # nothing was released: other jobs go on as before, with the rows of those who wait
        succeed(federation.run(replace(SEARCHING, num_rounds=1), "other"))
    if name == "too few":  # more come, and the batch is full
        ask(federation, rows, (20,) * 3, first=333)
        succeed(federation.run(replace(SEARCHING, forgets="august"), "later"))
        assert standing(federation, "site-3") == {Standing.FORGOTTEN: 353}


def test_with_the_consent_of_every_site_concerned_one_is_enough(tmp_path: Path, trained: Federation) -> None:
    rows, federation = frame(), trained.copied(tmp_path / "a")
    kept = ask(federation, rows, (1, 0, 0))
    federation.set_policy("site-1", consents={"recompute_with_changes": True, "plain_profile": True})
    succeed(federation.run(replace(SEARCHING, forgets="august"), "again"))
    assert "recompute_with_changes" in federation.record("site-1", "again").consents
    other = trained_on(tmp_path / "b", kept, SEARCHING, parts_of(rows, kept))
    assert federation.model("again") == other


def opened(federation: Federation, name: str, training: HorizontalJob) -> np.ndarray:
    """Return the first histogram that all sites see, as the sum of their parts in clear."""
    frames: list = []
    succeed(federation.run(training, name, frames=frames))
    first: dict[str, bytes] = {}
    for site, frame_ in frames:
        if unpack(frame_).kind is Kind.HISTOGRAM:
            first.setdefault(site, unpack(frame_).payload)
    return sum(np.frombuffer(payload, dtype="<i8") for payload in first.values())


def test_the_difference_of_two_runs_is_the_row_and_only_a_batch_shows_no_row(tmp_path: Path) -> None:
    """The attack: the first histograms with and without a person, subtracted. It works where one leaves alone."""
    rows = frame()
    in_clear = job(
        {"base_score": 0.5, "max_depth": 1},
        1,
        profile="plain",
        finest_exponent=-20,
        arithmetic="3.3",
    )
    consents = {"recompute_with_changes": True, "plain_profile": True}
    alone = federation_of(tmp_path / "alone", rows, consents=consents)
    before = opened(alone, "august", in_clear)
    ask(alone, rows, (1, 0, 0))
    difference = before - opened(alone, "again", replace(in_clear, forgets="august"))
    found = set(difference[difference != 0].tolist())
    assert 1 <= np.count_nonzero(difference) <= 2 * 5 and len(found) == 2, "one gradient and one hessian, bin by bin"

    many = federation_of(tmp_path / "many", rows)
    succeed(many.run(in_clear, "august"))
    ask(many, rows, (1, 0, 0))
    refused(many, replace(in_clear, forgets="august"), "again")
    ask(many, rows, (N_GONE,) * 3, first=1)
    succeed(many.run(replace(in_clear, forgets="august"), "later"))
    # Whoever asks afterwards waits for the next batch: the second batch less the first would be one row again.
    ask(many, rows, (1, 0, 0), first=600)
    refused(many, replace(in_clear, forgets="later"), "third")


def test_rows_of_the_forgotten_never_come_back_and_the_data_set_may_grow(tmp_path: Path) -> None:
    rows, more = frame(4500), frame(1200, seed=1)
    federation = federation_of(tmp_path, rows)
    succeed(federation.run(job(), "august"))
    ask(federation, rows, (N_GONE,) * 3)
    succeed(federation.run(job(forgets="august"), "again"))
    succeed(federation.run(job(), "as-ever"))  # the file still has them
    assert federation.model("as-ever") == federation.model("again")
    # The next month brings new rows, some of a person who is forgotten.
    more.loc[0, "person"] = rows.person[0]
    parts = {
        site: pd.concat([rows.iloc[old], more.iloc[new]], ignore_index=True)
        for site, old, new in zip(
            federation.sites, np.array_split(np.arange(len(rows)), 3), np.array_split(np.arange(1200), 3), strict=True
        )
    }
    for site, part in parts.items():
        federation.give(site, "train", part, id="person")
    succeed(federation.run(job(), "september"))
    assert [federation.record(site, "september").data[0].rows for site in federation.sites] == [1499, 1500, 1500]
    # Who came in September has rows that August's jobs had not: that person waits, and the others need not.
    late = more.person[1]
    forgetting(federation, "site-1").add("train", [late])
    ask(federation, rows, (350,) * 3, first=N_GONE)
    succeed(federation.run(job(forgets="september"), "september-again"))
    assert standing(federation, "site-1") == {Standing.FORGOTTEN: N_GONE + 350, Standing.WAITING: 1}
    assert [federation.record(site, "september-again").data[0].rows for site in federation.sites] == [1149, 1150, 1150]
    # The older job is trained again by itself: nobody new leaves, and what it shows was shown.
    succeed(federation.run(job(forgets="again"), "again-too"))
    expected = pd.concat([rows.iloc[places[-750:]] for places in np.array_split(np.arange(len(rows)), 3)])
    other = trained_on(tmp_path / "b", expected, job(), np.array_split(np.arange(2250), 3))
    assert federation.model("again-too") == other
    assert forgetting(federation, "site-1").replaced() == {
        "august": "again",
        "september": "september-again",
        "again": "again-too",
    }


def test_rows_of_who_waits_that_no_job_has_used_are_left_out_at_once(tmp_path: Path) -> None:
    rows, other = frame(), frame(600, seed=3)
    federation = federation_of(tmp_path, rows)
    places = dict(zip(federation.sites, np.array_split(np.arange(600), 3), strict=True))
    give(federation, places, other, "new")
    forgetting(federation, "site-1").add("new", list(other.person[:5]))
    succeed(federation.run(replace(job(), data_set="new"), "first"))
    assert federation.record("site-1", "first").data[0].rows == 195
    succeed(federation.run(replace(job({"eta": 0.1}), data_set="new"), "second"))
    assert federation.record("site-1", "second").data[0].rows == 195


DIES = {
    "before anything is counted": (Kind.EFFECTIVE_ROWS, 1),
    "in the first tree": (Kind.HISTOGRAM, 1),
    "in the last tree": (Kind.HISTOGRAM, 4),
    "when models are compared": (Kind.MODEL_CHECK, 1),
    "before all have written": (Kind.CLOSING, 2),
}


@pytest.mark.parametrize(
    "where", quick(DIES, "before anything is counted", "in the first tree", "before all have written")
)
def test_no_request_is_lost_or_done_too_early_wherever_a_machine_dies(
    tmp_path: Path, trained: Federation, where: str
) -> None:
    rows, training, federation = frame(), SEARCHING, trained.copied(tmp_path / "a")
    kept = ask(federation, rows, (N_GONE,) * 3)
    again = replace(training, forgets="august")
    outcomes = federation.run(again, "dead", tamper={"site-2": dies_at(*DIES[where])})
    assert any(isinstance(outcome, Exception) for outcome in outcomes.values())
    for site in federation.sites:
        found = standing(federation, site)
        assert sum(found.values()) == N_GONE and Standing.FORGOTTEN not in found
        assert not forgetting(federation, site).replaced()
        # Who asks meanwhile is no part of the batch that has begun.
        forgetting(federation, site).add("train", [rows.person[{"site-1": 700, "site-2": 1500, "site-3": 2300}[site]]])
    if where == "before anything is counted":
        kept = kept.drop(index=[700, 1500, 2300])
    succeed(federation.run(again, "second"))
    assert federation.model("second") == trained_on(tmp_path / "b", kept, training, parts_of(rows, kept))
    assert sum(standing(federation, "site-1").values()) == N_GONE + 1
    assert standing(federation, "site-1")[Standing.FORGOTTEN] >= N_GONE


def test_a_job_that_forgets_goes_on_from_its_own_checkpoint_and_from_none_that_saw_them(tmp_path: Path) -> None:
    rows = frame()
    federation = federation_of(tmp_path / "a", rows)
    training = job(num_rounds=3, checkpoint_every=1)
    succeed(federation.run(training, "august"))
    federation.run(
        replace(training, params={**training.params, "eta": 0.2}), "lost", tamper={"site-2": dies_at(Kind.HISTOGRAM, 8)}
    )
    kept = ask(federation, rows, (N_GONE,) * 3)
    again = replace(training, forgets="august")
    federation.run(again, "dead", tamper={"site-2": dies_at(Kind.HISTOGRAM, 8)})
    succeed(federation.run(replace(again, resume_from="dead"), "resumed"))
    assert federation.model("resumed") == trained_on(tmp_path / "b", kept, training, parts_of(rows, kept))
    assert forgetting(federation, "site-3").replaced() == {"august": "resumed"}
    # A checkpoint and a model that saw them are states of other rows.
    refused(federation, replace(training, params={**training.params, "eta": 0.2}, resume_from="lost"), "back")
    new = frame(900, seed=5)
    give(federation, dict(zip(federation.sites, np.array_split(np.arange(900), 3), strict=True)), new, "new")
    more = replace(training, data_set="new", num_rounds=1)
    for start in ({"continue_from": "august"}, {"initial_model": "old.json"}):
        for site in federation.sites:
            federation.give_input(site, "old.json", json.loads(federation.model("august")))
        outcomes = federation.run(replace(more, **start), "warm-" + next(iter(start)).replace("_", "-"))
        assert any("resumed, which replaces it" in str(outcome) for outcome in outcomes.values()), outcomes
    succeed(federation.run(replace(more, continue_from="resumed"), "warm"))


def test_a_site_leaves_only_where_all_had_agreed_to_go_on_without_one(tmp_path: Path) -> None:
    rows = frame(1600)
    consents = {"continue_without_site": True, "plain_profile": True}
    for name, lost, given, allowed in (
        ("all", "continue", consents, True),
        ("not-the-job", "wait", consents, False),
        ("not-the-site", "continue", {"plain_profile": True}, False),
    ):
        federation = Federation(tmp_path / name, n_sites=4, policy={**POLICY, "consents": consents, "min_sites": 3})
        places = np.array_split(np.arange(1600), 4)
        give(federation, dict(zip(federation.sites, places, strict=True)), rows)
        training = job(on_lost_site=lost)
        succeed(federation.run(training, "august"))
        federation.set_policies(consents=given)
        again = replace(training, forgets="august", on_lost_site="stop")
        rest = federation.sites[:3]
        if not allowed:
            refused(federation, again, "again", sites=rest)
            continue
        refused(federation, replace(again, forgets=None), "without-it", sites=rest)
        succeed(federation.run(again, "again", sites=rest))
        other = trained_on(tmp_path / "b", rows.iloc[:1200], job(), places[:3])
        assert federation.model("again", rest) == other
        assert "continue_without_site" in federation.record("site-1", "again").consents
        # Not together with persons: both differences would be one.
        forgetting(federation, "site-1").add("train", [rows.person[0]])
        refused(federation, again, "both", sites=rest)


def veilboost(federation: Federation, *words: str | Path) -> int:
    return main([*map(str, words), "--workspace", str(federation.workspace("site-1")), "--site", "site-1"])


@pytest.mark.usefixtures("every_report")
def test_the_walk_of_a_data_protection_officer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = frame()
    federation = federation_of(tmp_path / "sites", rows)
    federation.set_policies(runs="runs")
    folder, copy = tmp_path / "job", tmp_path / "copy"
    recipe = HorizontalXGBRecipe("outcome", data_set="train", label="y", num_rounds=4, params=job().params)
    recipe.export(folder)
    succeed(federation.run(read_job(folder / "outcome"), "august"))
    assert veilboost(federation, "models", "add", "outcome", "august") == 0

    secret = "P0-00007"
    ask_file = tmp_path / "requests.txt"
    federation.give("site-1", "alias", rows[:20], id="person")
    federation.give("site-1", "others", rows[20:40], id="person")
    ask_file.write_text("\ufeffP0-00001\n\n P0-00002 \n", encoding="utf-8")
    assert veilboost(federation, "forget", "add", secret, "--file", ask_file, "--data-set", "train") == 0
    assert "are in data sets 'alias' too: add them there as well" in capsys.readouterr().out
    for words, what in (
        (("add", "nobody-here", "--data-set", "train"), "1 of 1 id are not"),
        (("add", "--data-set", "train"), "give ids"),
        (("add", secret), "needs --data-set"),
        (("add", secret, "--data-set", "tr"), "no data set"),
        (("plan", "nothing"), "run.json"),
        (("plan",), "plan JOB_ID"),
        (("plan", "august", "--job", folder), "together"),
    ):
        capsys.readouterr()
        assert veilboost(federation, "forget", *words) == 1
        said = capsys.readouterr().err
        assert what in said and "nobody-here" not in said and secret not in said, said
    assert veilboost(federation, "forget", "add", "nobody-here", "--absent", "--data-set", "train") == 0
    assert veilboost(federation, "forget", "withdraw", "nobody-here", "--data-set", "train") == 0
    capsys.readouterr()
    assert veilboost(federation, "forget", "plan", "august", "--job", folder / "outcome", "--out", copy) == 0
    said = capsys.readouterr().out
    assert "3 persons, 3 rows; 797 stay" in said and "Not forgotten: " in said
    again = read_job(copy)
    assert again == replace(read_job(folder / "outcome"), forgets="august")
    refused(federation, again, "too-soon")
    assert veilboost(federation, "forget") == 0
    assert "data set 'train': 3 wait (the first since 20" in capsys.readouterr().out

    ask(federation, rows, (N_GONE,) * 3)
    succeed(federation.run(again, "again"))
    capsys.readouterr()
    assert veilboost(federation, "forget", "status", "--json") == 0
    (queue,) = json.loads(capsys.readouterr().out)["queues"]
    assert (queue["waiting"], queue["forgotten"]) == (0, N_GONE) and queue["receipts"][0]["replaces"] == "august"
    for command in ("registry", "runs", "models"):
        place = [] if command != "registry" else [federation.workspace("site-1")]
        words = [command, *map(str, place)] if place else [command]
        assert (main([*words, "--site", "site-1"]) if place else veilboost(federation, *words)) == 0
        assert "forgotten" in capsys.readouterr().out, command
    assert veilboost(federation, "models", "add", "outcome", "again") == 0
    for words in (("add", "other", "august"), ("rollback", "outcome", "1")):
        capsys.readouterr()
        assert veilboost(federation, "models", *words) == 1
        assert "job again, which replaces it" in capsys.readouterr().err
    for path in (tmp_path / "sites").rglob("*"):
        if path.is_file() and path.suffix != ".parquet":
            assert secret.encode() not in path.read_bytes(), path
    found = verify(find_evidence([federation.run_folder(site, "again") for site in federation.sites]))
    assert any("trained again without persons of job august" in note for one in found.attempts for note in one.notes)


def test_other_kinds_refuse_the_field_by_name_and_use_nobody_who_asked(tmp_path: Path) -> None:
    for kind, case in CASES.items():
        if kind != "horizontal":
            with pytest.raises(ConfigurationError, match="forgets"):
                KINDS[kind].job.from_dict({**case.fields, "forgets": "august"})


def test_a_private_job_leaves_out_who_asked_and_keeps_its_ledger(tmp_path: Path) -> None:
    federation = PrivateFederation(tmp_path, frame_of().assign(person=np.arange(900)))
    federation.set_policies(data_sets={DATA: {"path": f"{DATA}.parquet", "id": "person", "privacy": BUDGET}})
    features = ["x0", "x1", "x2", "x3", "colour"]
    federation.run_private(job_of(features=features), "august").succeed()
    spent = federation.ledger("site-1").spent().epsilon(BUDGET["delta"])
    assert forgetting(federation, "site-1").add(DATA, [str(number) for number in range(40)]) == 40
    assert federation.ledger("site-1").spent().epsilon(BUDGET["delta"]) == spent > 0
    federation.run_private(job_of(features=features), "september").succeed()
    assert federation.record("site-1", "september").data[0].rows == 260
    assert federation.ledger("site-1").spent().epsilon(BUDGET["delta"]) > spent


@pytest.mark.parametrize(
    "kind", ["bagging", "alignment", "vertical", "vertical_tuning", "vertical_inference", "federboost_vertical"]
)
def test_other_jobs_have_no_rows_of_who_asked(tmp_path: Path, kind: str) -> None:
    """Bagging leaves them out; vertical jobs cannot, and refuse the file with the text that all refusals have."""
    parties = CASES[kind].give(tmp_path)
    site, name = parties.sites[0], "rows"
    path = parties.workspace(site) / parties.policy_of(site)["data_sets"][name]["path"]
    held = pd.read_parquet(path)
    if "id" not in parties.policy_of(site)["data_sets"][name]:
        held.assign(person=np.arange(len(held))).to_parquet(path)
        entry = {**parties.policy_of(site)["data_sets"][name], "id": "person"}
        parties.set_policy(site, data_sets={name: entry})
        held = pd.read_parquet(path)
    parties.set_policy(site, share_data_errors=False)
    column = parties.policy_of(site)["data_sets"][name]["id"]
    forgetting(parties, site).add(name, [str(held[column].iloc[0])])
    found = KINDS[kind]
    outcomes = parties.run(found.run, found.job.from_dict(dict(CASES[kind].fields)))
    if kind == "bagging":
        succeed(outcomes)
        record = json.loads((parties.run_folder(site) / "run.json").read_text())
        assert record["data"][0]["rows"] == len(held) - 1
    else:
        assert isinstance(outcomes[site], DataRefusal) and str(outcomes[site]) == ROWS_TEXT
        assert "who asked to be forgotten" in outcomes[site].reason
        assert not any("forgotten" in str(outcome) for outcome in outcomes.values())
