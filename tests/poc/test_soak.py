"""The soak itself: what it draws repeats, and what must not be is found. ``make soak`` runs it for hours."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from pathlib import Path

import pytest

from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.flare.kinds import KINDS
from tests.poc import soak
from tests.poc.soak import Draw, Idle, Violation, drawn, expected, give


def test_a_job_of_the_run_follows_from_seed_and_number_alone() -> None:
    draws = [drawn(3, index) for index in range(240)]
    assert draws[100:] == [drawn(3, index) for index in range(100, 240)] and draws != [drawn(4, n) for n in range(240)]
    for dozen in range(0, 240, len(KINDS)):
        assert {draw.kind for draw in draws[dozen : dozen + len(KINDS)]} == set(KINDS)
    assert {draw.fault for draw in draws} == set(soak.FAULTS) and any(draw.moment == 0 for draw in draws)


def test_which_jobs_may_end_without_a_result() -> None:
    cut = Draw(0, "horizontal", soak.CUT, "site-1", 0.5, 10.0)
    assert not cut.may_end and not dataclasses.replace(cut, lasts_s=110.0).may_end
    assert not dataclasses.replace(cut, kind="bagging").may_end
    assert dataclasses.replace(cut, kind="bagging", lasts_s=110.0).may_end
    assert not dataclasses.replace(cut, fault=soak.KILL_MACHINE).may_end
    assert dataclasses.replace(cut, fault=soak.KILL_MACHINE, moment=0.0).may_end, "before it takes part"
    for fault in (soak.FULL_DISK, soak.KILL_SERVER_JOB):
        assert not dataclasses.replace(cut, fault=fault).may_end
        assert dataclasses.replace(cut, fault=fault, kind="bagging").may_end
    assert dataclasses.replace(cut, fault=soak.KILL_SERVER_JOB, kind="dpboost").may_end, "it draws no noise again"


@pytest.mark.parametrize("kind", ["horizontal", "tuning"])
def test_another_result_is_found(tmp_path: Path, kind: str) -> None:
    runs = {site: tmp_path / site for site in soak.SITES}
    file, (before, after) = {
        "horizontal": ("model.json", (b'"num_trees"', b'"num_treez"')),
        "tuning": ("tuning.csv", (b"\n1,1,2,0", b"\n1,1,2,1")),
    }[kind]
    parties = give(kind, tmp_path)
    for site in soak.SITES:
        soak.plant_secret(soak.SitePolicy.load(parties.workspace(site), site))
        runs[site] = parties.run_folder(site)
    soak.succeed(parties.run(KINDS[kind].run, KINDS[kind].job.from_dict(soak.fields_of(kind))))
    soak.check_result(kind, runs)
    path = runs["site-2"] / file
    assert before in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(before, after))
    with pytest.raises(Violation, match="not that of the undisturbed job"):
        soak.check_result(kind, runs)


def test_a_job_that_is_charged_twice_or_not_or_stays_open_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    price, free = expected("private_trees").spent["site-1"], expected("profile").spent  # before the patches
    ledgers = {"site-1": Path("ledgers")}
    assert not free
    twice = dataclasses.replace(price, events=tuple((event, 2 * count) for event, count in price.events))
    for wrong in ([price, price], [twice], []):
        monkeypatch.setattr(soak, "spending", lambda folder, found=wrong: found)
        with pytest.raises(Violation):
            soak.check_charges("private_trees", "job", ledgers, is_whole=True)
    monkeypatch.setattr(soak, "spending", lambda folder: [price])
    soak.check_charges("private_trees", "job", ledgers, is_whole=True)
    with pytest.raises(Violation, match="free"):
        soak.check_charges("profile", "job", ledgers, is_whole=True)
    soak.check_none_held(ledgers)
    monkeypatch.setattr(soak, "spending", lambda folder: [dataclasses.replace(price, state="open")])
    with pytest.raises(Violation, match="hold a part of a budget"):
        soak.check_none_held(ledgers)


def test_what_grows_is_found_and_noise_is_not() -> None:
    def over_jobs(a_job: float) -> list[Idle]:
        return [Idle({"server": 1}, {"handles of server": 17 + n % 3 + a_job * n, "processes": 8}) for n in range(30)]

    def restarted(a_job: float) -> list[Idle]:
        """Each process of the server begins with 17 handles, and is gone after six jobs."""
        numbers = [{"handles of server": 17 + a_job * (n % 6), "processes": 8} for n in range(30)]
        return [Idle({"server": n // 6}, one) for n, one in enumerate(numbers)]

    for held, grows in ((over_jobs(0.0), over_jobs(1.0)), (restarted(0.0), restarted(1.0))):
        soak.check_growth(held)
        with pytest.raises(Violation, match="handles of server grows by"):
            soak.check_growth(grows)
    assert soak.added([*range(0, 100, 10), *range(100, 120)]) == [10.0, 0.0], "the first ten jobs are a warm-up"
    steady, error = soak.added(soak.series(over_jobs(0.0))["handles of server"])
    assert abs(steady) < 2 * error


def test_lines_of_a_log_that_is_being_written_count(tmp_path: Path) -> None:
    log = EvidenceLog(tmp_path / "evidence" / "site-1.evidence.jsonl", "site-1", "job", "aa" * 16, "masks")
    log.round(0)
    assert soak.n_lines(tmp_path) == 2
    log.end("completed")
    log.close()
    assert soak.n_lines(tmp_path) == 4


def test_an_error_in_a_log_of_a_job_that_nothing_befell_is_found(tmp_path: Path) -> None:
    for party in ("server", "site-1"):
        (tmp_path / party / "job").mkdir(parents=True)
        (tmp_path / party / "error_log.txt").write_text("another job failed\n")
        (tmp_path / party / "job" / "error_log.txt").touch()
    soak.check_no_errors(tmp_path, "job-1")
    for wrong in ("server/error_log.txt", "site-1/job-1/error_log.txt"):
        path = tmp_path / wrong
        path.parent.mkdir(exist_ok=True)
        path.write_text("job-1: it ended before it began\n")
        with pytest.raises(Violation, match="logs call it an error"):
            soak.check_no_errors(tmp_path, "job-1")
        path.unlink()


def test_an_end_that_names_nothing_is_found() -> None:
    draw = drawn(1, 1)
    soak.check_ended_by_name(draw, [f"server: {draw.site} has gone"])
    with pytest.raises(Violation, match="no reason names"):
        soak.check_ended_by_name(draw, ["server: it failed"])


def test_a_line_carries_bytes_until_it_is_cut_and_again_when_it_is_mended() -> None:
    def joined(port: int) -> socket.socket:
        deadline = time.monotonic() + 60
        while True:
            try:
                return socket.create_connection(("127.0.0.1", port), 60)
            except ConnectionRefusedError:  # it looks for the server every while
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def answered(caller: socket.socket) -> socket.socket:
        caller.sendall(b"word")
        while True:  # among those with which the line looks for the server
            end = server.accept()[0]
            if end.recv(4) == b"word":
                return end

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        line = soak.Line(server.getsockname()[1])
        with joined(line.port) as caller, answered(caller) as end:
            line.cut()
            assert caller.recv(1) == b"" and end.recv(1) == b"", "both ends are told"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", line.port), 60)
        line.mend()
        with joined(line.port) as caller, answered(caller):
            line.close()


@pytest.mark.poc
@pytest.mark.slow
def test_a_short_run_goes_on_where_it_was_told_to_and_leaves_its_record(tmp_path: Path) -> None:
    assert soak.run(tmp_path, 1, 1, 1.0, 2) == 0
    lines = [json.loads(line) for line in (tmp_path / "soak.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [1, 2] and all("completed" in line["ended"] for line in lines)
    assert list(tmp_path.iterdir()) == [tmp_path / "soak.jsonl"], "no violation leaves a federation behind"
