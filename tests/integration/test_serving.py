"""A job that stays, over whole sites in one process: scores, refusals, refreshed rows, hostile callers, its end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.cli.main import main
from nvflare_plugins.kinds.alignment.align import align_site
from nvflare_plugins.kinds.alignment.job import AlignmentJob
from nvflare_plugins.kinds.vertical_inference import serving as parties
from nvflare_plugins.kinds.vertical_inference.score_socket import MOST_CONNECTIONS, MOST_LINE_BYTES, SOCKET, reachable
from nvflare_plugins.kinds.vertical_inference.site import run_inference
from tests.integration.test_vertical_inference import SITES, Case, make_case, only_error
from tests.support.federation import Parties, succeed
from tests.support.threads import in_threads

WAIT_S = 60.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Case:
    return make_case(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def case(trained, tmp_path) -> Case:
    """A case of its own for every test, whose passive parties consent."""
    folder = tmp_path / "sites"
    shutil.copytree(trained.parties.folder, folder)
    case = Case(Parties(folder, 3), trained.rows, trained.reference, trained.ids)
    for site in SITES[1:]:
        case.parties.set_policy(site, consents={"scoring": True})
    return case


class Caller:
    """One connection to the socket of a job that stays."""

    def __init__(self, path: Path) -> None:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.settimeout(WAIT_S)
        with reachable(path) as name:
            self.connection.connect(name)
        self._answers = self.connection.makefile("rb")

    def say(self, line: bytes) -> dict[str, Any] | None:
        with contextlib.suppress(OSError):
            self.connection.sendall(line)
        with contextlib.suppress(OSError):
            answer = self._answers.readline()
            return json.loads(answer) if answer else None
        return None

    def ask(self, **request: Any) -> dict[str, Any]:
        answer = self.say(json.dumps(request).encode() + b"\n")
        assert answer is not None
        return answer

    def close(self) -> None:
        self._answers.close()
        self.connection.close()


def served(case: Case, use: Callable[[Caller], None], job_id: str = "job", stops: bool = True, **fields: Any):
    """Run a job that stays, use it, and stop it; return the outcomes of the parties."""
    outcomes: dict[str, Any] = {}
    job = case.job(action="serve", **{"batch_rows": 32, **fields})
    thread = threading.Thread(target=lambda: outcomes.update(case.parties.run(run_inference, job, job_id)), daemon=True)
    thread.start()
    path = case.result(SOCKET, job_id)
    caller = connected(path, thread)
    try:
        if caller is not None:
            use(caller)
    finally:
        if caller is not None:
            if stops:
                caller.ask(stop=True)
            caller.close()
        thread.join(WAIT_S)
    assert not thread.is_alive() and not path.exists()
    return outcomes


def connected(path: Path, thread: threading.Thread) -> Caller | None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and thread.is_alive():
        with contextlib.suppress(OSError):
            return Caller(path)
        time.sleep(0.02)
    return None


def test_rows_are_scored_as_centralized_training_would(case):
    expected = case.expected()

    def use(caller: Caller) -> None:
        path = case.result(SOCKET)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        for rows in ([0], [17], [5, 3, 5, 199], list(range(40, 72))):
            scores = caller.ask(rows=rows)["scores"]
            assert [score["row"] for score in scores] == rows
            chances = np.array([score["probability"]["1"] for score in scores], dtype=np.float32)
            np.testing.assert_array_equal(chances, expected[rows])
            assert [score["class"] for score in scores] == [str(int(one > 0.5)) for one in expected[rows]]
        (score,) = caller.ask(ids=[case.ids[9]])["scores"]
        assert score["id"] == case.ids[9] and score["row"] == 9
        status = caller.ask(status=True)
        assert status["common_rows"] == 200 and status["requests"] == 5 and status["rows"] == 39
        assert status["seconds"]["p95"] > 0

    outcomes = succeed(served(case, use))
    assert len({outcome.hmac for outcome in outcomes.values()}) == 1
    assert json.loads(case.result("served.json").read_text())["rows"] == 39
    for site in SITES:
        said = " ".join(case.parties.said[site])
        assert "person" not in said and "max_jobs" in said
        folder = case.parties.run_folder(site)
        assert (folder / "run.json").is_file() and not list(folder.rglob("*.partial"))


def test_several_callers_at_once_get_their_own_rows(case):
    expected = case.expected()

    def use(caller: Caller) -> None:
        wrong: list[int] = []

        def call(first: int) -> None:
            own = Caller(case.result(SOCKET))
            for row in range(first, first + 5):
                (score,) = own.ask(rows=[row])["scores"]
                if np.float32(score["probability"]["1"]) != expected[row] or score["row"] != row:
                    wrong.append(row)
            own.close()

        in_threads(call, range(0, 60, 10), WAIT_S)
        assert not wrong and caller.ask(status=True)["requests"] == 30

    succeed(served(case, use))


def test_a_consent_is_needed(case):
    case.parties.set_policy("site-3", consents={})
    outcomes = served(case, lambda caller: None)
    text = only_error(outcomes, PolicyRefusal)
    assert "consents.scoring" in text and "site-3" in text


def test_a_model_whose_rows_would_all_be_refused_is_not_served(case):
    """Found before the first caller comes; the party's own log says both numbers, and others learn none."""
    case.parties.set_policy("site-2", consents={"scoring": True}, vertical={"scoring_bits_per_row": 1})
    text = only_error(served(case, lambda caller: None), PolicyRefusal)
    assert "site-2" in text and "vertical.scoring_bits_per_row" in text and not re.search(r" \d", text)
    assert any(re.search(r"counts \d+ bits .* of 1 in its life", line) for line in case.parties.said["site-2"])


def test_limits_refuse_rows_and_not_the_job(case):
    case.parties.set_policy("site-2", consents={"scoring": True}, vertical={"scoring_rows_per_day": 3})

    def use(caller: Caller) -> None:
        assert len(caller.ask(rows=[0, 1])["scores"]) == 2
        refused = caller.ask(rows=[2, 3, 4])["error"]
        assert "site-2" in refused and "vertical.scoring_rows_per_day" in refused and "person" not in refused
        assert len(caller.ask(rows=[2])["scores"]) == 1
        assert "error" in caller.ask(rows=[5])
        assert len(caller.ask(rows=[0, 1, 2])["scores"]) == 3, "what is on the record is answered for nothing"

    succeed(served(case, use))
    said = [line for line in case.parties.said["site-2"] if "refused" in line]
    assert len(said) == 1, "no caller can fill the log"

    def again(caller: Caller) -> None:
        assert len(caller.ask(rows=[0, 1, 2])["scores"]) == 3, "the record outlives the job"
        assert "error" in caller.ask(rows=[3])

    succeed(served(case, again, "second"))


def test_a_refusal_at_one_party_charges_nothing_at_another(case):
    """Else whoever asks could use up one party's rows of a day by means of the other's."""
    case.parties.set_policy("site-2", consents={"scoring": True}, vertical={"scoring_rows_per_day": 10})
    case.parties.set_policy("site-3", consents={"scoring": True}, vertical={"scoring_rows_per_day": 1})

    def use(caller: Caller) -> None:
        for first in range(0, 50, 5):
            assert "site-3" in caller.ask(rows=list(range(first, first + 5)))["error"]

    succeed(served(case, use))
    case.parties.set_policy("site-3", consents={"scoring": True}, vertical={"scoring_rows_per_day": 100})

    def afterwards(caller: Caller) -> None:
        assert len(caller.ask(rows=list(range(10)))["scores"]) == 10

    succeed(served(case, afterwards, "second"))


def test_one_job_asks_for_no_more_rows_than_a_party_allows(case):
    case.parties.set_policy("site-2", consents={"scoring": True}, vertical={"predictions_per_job": 4})

    def use(caller: Caller) -> None:
        assert len(caller.ask(rows=[0, 1, 2, 3])["scores"]) == 4
        assert "vertical.predictions_per_job" in caller.ask(rows=[4])["error"]
        assert len(caller.ask(rows=[3])["scores"]) == 1

    succeed(served(case, use))


def aligned(case: Case, job_id: str) -> None:
    succeed(case.parties.run(align_site, AlignmentJob(data_sets=["new"]), job_id))


def test_rows_of_a_newer_alignment_are_taken_without_a_new_job(case):
    for i, site in enumerate(SITES):
        case.parties.set_policy(
            site, consents={"scoring": True}, vertical={"scoring_alignments_per_day": 5, "min_intersection": 10}
        )
        path = case.parties.workspace(site) / "new.parquet"
        frame = pd.read_parquet(path)
        frame.iloc[:150].sample(frac=1, random_state=i).to_parquet(path, index=False)
        frame.to_parquet(path.with_name("later.parquet"), index=False)
    aligned(case, "night-1")
    expected = case.expected()

    def use(caller: Caller) -> None:
        assert caller.ask(status=True)["common_rows"] == 150
        assert "not among the rows" in caller.ask(ids=[case.ids[180]])["error"]
        for site in SITES:
            folder = case.parties.workspace(site)
            (folder / "later.parquet").replace(folder / "new.parquet")
        missing = caller.ask(refresh="night-2")["error"]
        assert "site-1, site-2, site-3 cannot take it" in missing
        assert caller.ask(rows=[3])["scores"][0]["row"] == 3, "the rows before it stay in use"
        aligned(case, "night-2")
        shutil.move(case.parties.run_folder("site-3", "night-2"), case.parties.workspace("site-3") / "away")
        assert "site-3 cannot take it" in caller.ask(refresh="night-2")["error"]
        shutil.move(case.parties.workspace("site-3") / "away", case.parties.run_folder("site-3", "night-2"))
        assert caller.ask(refresh="night-2")["common_rows"] == 200
        (score,) = caller.ask(ids=[case.ids[180]])["scores"]
        assert np.float32(score["probability"]["1"]) == expected[180]
        assert caller.ask(status=True)["alignment"] == "night-2"

    succeed(served(case, use, alignment="night-1"))


def test_a_caller_who_does_not_keep_to_the_form_ends_nothing(case):
    def use(caller: Caller) -> None:
        bad: list[bytes] = [
            b"\xff\xfe",
            b"nothing",
            b"[" * 50_000,
            b"1" * 6000,
            b"{}",
            b'{"rows": []}',
            b'{"rows": [200]}',
            b'{"rows": [-1]}',
            b'{"rows": [true]}',
            b'{"rows": [1.0]}',
            b'{"rows": [1e400]}',
            b'{"rows": "0"}',
            b'{"rows": [0], "ids": []}',
            b'{"ids": [7]}',
            b'{"ids": ["nobody", "\\ud800"]}',
            b'{"refresh": "../../etc"}',
            b'{"refresh": 3}',
            b'{"delete": true}',
            json.dumps({"rows": [0] * 33}).encode(),
        ]
        for line in bad:
            answer = caller.say(line + b"\n")
            assert answer is not None and set(answer) == {"error"}, line[:50]
            assert "nobody" not in answer["error"] and "etc" not in answer["error"].replace("fetch", "")
        long = Caller(case.result(SOCKET))
        told = long.say(b"x" * (MOST_LINE_BYTES + 100_000))  # it may leave before it has read them all
        assert "at most" in (told or {})["error"]
        with contextlib.suppress(OSError):
            assert long.connection.recv(1) == b"", "it is left"
        others = [Caller(case.result(SOCKET)) for _ in range(MOST_CONNECTIONS + 4)]
        left = [other.say(b"") for other in others[MOST_CONNECTIONS:]]
        assert all(answer is not None and "connected already" in answer["error"] for answer in left)
        for other in others:
            other.close()
        assert caller.ask(rows=[0])["scores"][0]["row"] == 0

    succeed(served(case, use))


@pytest.mark.parametrize(("limits", "words"), [({"serve_s": 1.0}, "serve_s"), ({"idle_s": 1.0}, "idle_s")])
def test_the_job_ends_by_its_own_terms(case, limits, words):
    succeed(served(case, lambda caller: None, stops=False, **limits))
    assert any(words in line for line in case.parties.said["site-1"])


def test_a_job_that_nobody_asks_is_not_taken_to_hang(case, monkeypatch):
    """Training that asks nothing for long is; here silence is the ordinary case."""
    usual = parties._flow
    flow = lambda run, n_splits: dataclasses.replace(usual(run, n_splits), patience_s=0.2, idle_s=1.5)  # noqa: E731
    monkeypatch.setattr(parties, "_flow", flow)

    def use(caller: Caller) -> None:
        time.sleep(4)
        assert caller.ask(rows=[1])["scores"][0]["row"] == 1

    succeed(served(case, use))


def test_the_job_ends_when_its_evidence_is_large(case):
    def use(caller: Caller) -> None:
        for _ in range(2000):
            answer = caller.say(json.dumps({"rows": [0]}).encode() + b"\n")
            if answer is None or "error" in answer:
                return
        raise AssertionError("it stayed")

    succeed(served(case, use, stops=False, evidence_mib=1))
    size = sum(path.stat().st_size for path in case.parties.run_folder("site-1").rglob("*.jsonl"))
    assert 1 << 20 <= size < 2 << 20


def test_the_command_asks_and_stops(case, capsys):
    def use(caller: Caller) -> None:
        where = ["--socket", str(case.result(SOCKET))]
        capsys.readouterr()
        assert main(["score", "job", "3", "4", *where]) == 0
        scores = json.loads(capsys.readouterr().out)["scores"]
        assert [score["row"] for score in scores] == [3, 4]
        assert main(["score", "job", case.ids[3], "--ids", *where]) == 0
        assert json.loads(capsys.readouterr().out)["scores"][0]["probability"] == scores[0]["probability"]
        assert main(["score", "job", "4000", *where]) == 1
        assert "no positions" in json.loads(capsys.readouterr().out)["error"]
        assert main(["score", "job", "--status", *where]) == 0
        assert main(["score", "job", "--stop", *where]) == 0
        where = ["--workspace", str(case.parties.workspace("site-1")), "--site", "site-1"]
        assert main(["score", "other", "1", *where]) == 1
        assert "no job takes requests" in capsys.readouterr().err

    succeed(served(case, use, stops=False))


def test_terms_that_do_not_fit():
    for wrong in ({"rows": [0, 5]}, {"data_set": None}, {"evidence_mib": 0}, {"batch_rows": 0}, {"serve_s": -1.0}):
        with pytest.raises(ConfigurationError):
            Case.job(None, action="serve", **wrong)  # type: ignore[arg-type]  # it does not look at the case
    with pytest.raises(ConfigurationError, match="on_lost_site"):
        Case.job(None, on_lost_site="wait")  # type: ignore[arg-type]
