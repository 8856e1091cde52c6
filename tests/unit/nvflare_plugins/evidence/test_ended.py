"""Logs of processes that died, closed by their owner afterwards."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nvflare_plugins.base.files import create_held, held_by_nobody, written_atomically
from nvflare_plugins.evidence.format import SERVER, export_name
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.evidence.reader import (
    DIED,
    SITES_FACT,
    all_have_written,
    before_attempt,
    contradictions,
    dead_logs,
    end_dead,
    end_torn,
    ended_early,
    excused,
    lost_of,
    named,
    put_aside,
    read_log,
    set_aside,
)
from nvflare_plugins.wire.envelope import Kind

KILLED = """
import os, signal, sys
from pathlib import Path
from nvflare_plugins.evidence.log import EvidenceLog
log = EvidenceLog(Path(sys.argv[1]), "site-1", "job", "aa", "masks")
for number in range(int(sys.argv[2])):
    log.round(number)
log.local("LEAF_COUNT", "update", "not flushed")
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(folder: Path, n_rounds: int) -> Path:
    path = folder / "evidence" / export_name("site-1")
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-c", KILLED, str(path), str(n_rounds)], check=False, env=os.environ)
    return path


def test_the_log_of_a_killed_process_is_closed_and_put_aside(tmp_path):
    path = killed(tmp_path, 3)
    assert not path.exists()
    put_aside(path.parent, 2, None)
    log = read_log(tmp_path / before_attempt(2) / path.name)
    assert [index for _, index in log.rounds] == [0, 1, 2] and not log.unfinished and not log.completed
    assert log.end["reason"] == DIED and not list(path.parent.iterdir())
    assert set_aside(tmp_path) == {2: [tmp_path / before_attempt(2) / path.name]}


@pytest.mark.parametrize("torn", [b'{"type": "rou', b"\x00" * 50, b'{"type":"round"}\n{}\n'])
def test_what_was_torn_is_left_out(tmp_path, torn):
    path = killed(tmp_path, 2)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(partial.read_bytes() + torn)
    put_aside(path.parent, 2, None)
    assert len(read_log(tmp_path / before_attempt(2) / path.name).rounds) == 2


def test_a_log_of_which_nothing_is_left_goes(tmp_path):
    path = killed(tmp_path, 0)  # nothing was flushed
    put_aside(path.parent, 2, None)
    assert not list(tmp_path.rglob("*.jsonl*")) and set_aside(tmp_path) == {}


def test_a_signed_session_is_sealed_with_the_same_key(tmp_path):
    facts = {"public_key_fingerprints": {}, "certificate_fingerprints": {}, "parameters_hash": "", "policy_hash": ""}
    signed = []
    evidence = tmp_path / "evidence"
    log = EvidenceLog(evidence / export_name("site-1"), "site-1", "job", "aa", "masks")
    log.session(sites=["site-1"], signed=True, versions={}, certificate="c", signer=lambda data: b"1", **facts)
    log.let_go()  # as if the process had died
    put_aside(evidence, 2, lambda data: signed.append(data) or b"\x02")
    (path,) = set_aside(tmp_path)[2]
    assert read_log(path).seal["signature"] == "02" and len(signed) == 1


def test_evidence_that_was_put_aside_is_never_overwritten(tmp_path):
    """A server that gives two attempts one number does not make a site forget what it recorded of the first."""
    killed(tmp_path, 1)
    put_aside(tmp_path / "evidence", 2, None)
    (kept,) = set_aside(tmp_path)[2]
    content = kept.read_bytes()
    killed(tmp_path, 2)
    with pytest.raises(FileExistsError):
        put_aside(tmp_path / "evidence", 2, None)
    assert kept.read_bytes() == content


@pytest.mark.parametrize(
    ("role", "directions", "is_completed"),
    [
        ("site", ["sent", "received", "sent"], False),
        ("site", ["sent", "received", "sent", "received"], True),
        ("server", ["received", "received"], False),
        ("server", ["received", "received", "sent", "received", "received"], False),
        ("server", ["received", "received", "sent", "received", "received", "sent"], True),
    ],
)
def test_a_torn_log_is_completed_once_all_were_known_to_have_written(tmp_path, role, directions, is_completed):
    """Of two sites and a server, whose closings are one message of each site, and one answer for both."""
    name = SERVER if role == "server" else "site-1"
    log = EvidenceLog(tmp_path / "evidence" / export_name(name), name, "job", "aa", "masks", role=role)
    for number, direction in enumerate(directions):
        log.record(direction, number, Kind.CLOSING.name, "FINISH", "PUBLIC", 0, b"", private=False)
    log.flush_last()
    log.let_go()
    end_torn(log.path.with_name(f"{log.path.name}.partial"), None)
    assert read_log(log.path).completed == is_completed


@pytest.mark.parametrize("refused", ["replace", "fsync"])
def test_a_log_whose_name_the_disk_refused_is_closed_again(tmp_path, monkeypatch, refused):
    log = EvidenceLog(tmp_path / "evidence" / export_name("site-1"), "site-1", "job", "aa", "masks")
    log.end("completed")
    for path in (log.path, tmp_path / "evidence"):
        monkeypatch.undo()
        change = getattr(os, refused)

        def full(what, *of, change=change, path=path):
            at = Path(os.readlink(f"/proc/self/fd/{what}")) if isinstance(what, int) else Path(of[0])
            if at == path:
                raise OSError(errno.ENOSPC, "full")
            return change(what, *of)

        monkeypatch.setattr(os, refused, full)
        with contextlib.suppress(OSError):
            log.close()
    monkeypatch.undo()
    assert read_log(log.close()).completed and not list(tmp_path.rglob("*.partial"))


def test_a_finished_log_stays_as_it_is(tmp_path):
    log = EvidenceLog(tmp_path / "evidence" / export_name("site-1"), "site-1", "job", "aa", "masks")
    log.end("aborted", "another site")
    content = log.close().read_bytes()
    put_aside(tmp_path / "evidence", 3, None)
    assert (tmp_path / before_attempt(3) / export_name("site-1")).read_bytes() == content
    put_aside(tmp_path / "evidence", 4, None)
    assert not (tmp_path / before_attempt(4)).exists()


def torn_when_all_had_written(folder: Path, n_heard: int) -> Path:
    log = EvidenceLog(folder / "evidence" / export_name("site-1"), "site-1", folder.name, "aa", "masks")
    log.model("model.json", 3, b"\x01" * 32)
    for counter in range(2):
        for direction in ("sent", "received")[: 1 + (counter < n_heard)]:
            log.record(direction, counter, "CLOSING", "finish 1", "PUBLIC", 0, b"", private=False)
    log.flush()
    log.let_go()
    return log.path.with_name(f"{log.path.name}.partial")


@pytest.mark.parametrize("n_heard", [1, 2])
def test_an_attempt_was_completed_if_its_site_had_heard_that_all_have_their_results(tmp_path, n_heard):
    partial = torn_when_all_had_written(tmp_path, n_heard)
    assert all_have_written(partial) is (n_heard == 2)
    end_torn(partial, None)
    log = read_log(partial.with_suffix(""))
    assert (log.completed, log.end["reason"]) == ((True, "") if n_heard == 2 else (False, DIED))


def test_a_log_that_lacked_its_name_alone_gets_it(tmp_path):
    partial = torn_when_all_had_written(tmp_path, 2)
    end_torn(partial, None)
    whole = partial.with_suffix("").rename(partial).read_bytes()
    end_torn(partial, None)
    assert partial.with_suffix("").read_bytes() == whole and not partial.exists()


# -- jobs that do not wait --------------------------------------------------------------------------------------------


def nobodys(job_id: str) -> bool:
    return False


def test_the_next_job_ends_what_a_killed_process_left(tmp_path):
    path = killed(tmp_path / "lost", 3)
    (tmp_path / "lost" / ".model.json.4711.4711.partial").touch()
    others = tmp_path / ".veilboost_memory.partial"  # a memory that is being made, where a policy keeps it here too
    others.touch()
    assert path.with_name(path.name + ".reserve").stat().st_size == 1 << 18
    assert list(dead_logs(tmp_path)) == [path.with_name(path.name + ".partial")]
    assert end_dead(tmp_path, nobodys, "", None) == ["lost"]
    log = read_log(path)
    assert [index for _, index in log.rounds] == [0, 1, 2] and not log.completed and log.end["reason"] == DIED
    assert {one for one in tmp_path.rglob("*") if one.is_file()} == {path, others}
    assert end_dead(tmp_path, nobodys, "", None) == [] and list(dead_logs(tmp_path)) == []


def test_what_a_process_that_lives_writes_is_left_alone(tmp_path):
    log = EvidenceLog(tmp_path / "runs" / "evidence" / export_name("site-1"), "site-1", "runs", "aa", "masks")
    with written_atomically(tmp_path / "runs" / "model.json") as file:
        file.write(b"{}")
        assert end_dead(tmp_path, nobodys, "", None) == [] and list(dead_logs(tmp_path)) == []
    log.round(0)
    assert read_log(log.close()).rounds and (tmp_path / "runs" / "model.json").read_bytes() == b"{}"
    assert not list(tmp_path.rglob("*.reserve"))


def meanwhile(monkeypatch, act):
    """Have something happen between a file's opening and its lock, once."""
    acts, lock = [act], fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda *held: (acts and acts.pop()(), lock(*held))[1])


def test_a_file_that_was_cleared_up_before_it_was_held_is_made_again(tmp_path, monkeypatch):
    path = tmp_path / "log"
    meanwhile(monkeypatch, path.unlink)
    descriptor = create_held(path, 0o600)
    os.write(descriptor, b"kept")
    assert path.read_bytes() == b"kept" and list(held_by_nobody([path])) == []
    os.close(descriptor)
    assert list(held_by_nobody([path])) == [path]


def test_a_file_that_was_finished_before_it_was_held_is_nobodys_to_end(tmp_path, monkeypatch):
    path = tmp_path / "model.json.partial"
    path.touch()
    meanwhile(monkeypatch, lambda: path.rename(tmp_path / "model.json"))
    assert list(held_by_nobody([path])) == []


def test_a_log_whose_job_goes_on_or_of_another_certificate_stays_as_it_is(tmp_path):
    path = killed(tmp_path / "waits", 1)
    assert end_dead(tmp_path, lambda job_id: job_id == "waits", "", None) == [] and not path.exists()
    log = EvidenceLog(tmp_path / "old" / "evidence" / export_name("site-1"), "site-1", "old", "aa", "masks")
    facts = {"public_key_fingerprints": {}, "certificate_fingerprints": {}, "parameters_hash": "", "policy_hash": ""}
    log.session(sites=["site-1"], signed=True, versions={}, certificate="before", signer=lambda data: b"1", **facts)
    partial = tmp_path / "old" / "evidence" / f"{export_name('site-1')}.partial"
    content = partial.read_bytes()
    log._file.close()  # as if the process had died
    assert end_dead(tmp_path, nobodys, "now", lambda data: b"2") == ["waits"]
    assert partial.read_bytes() == content and not list(tmp_path.rglob("*.reserve"))
    assert end_dead(tmp_path, nobodys, "before", lambda data: b"2") == ["old"]


# -- jobs that went on -------------------------------------------------------------------------------------------------


ALL, LEFT = ("site-1", "site-2", "site-3"), ("site-1", "site-3")


def logs(
    sites: tuple[str, ...],
    completed: bool,
    lost: tuple[str, ...] = (),
    of: tuple[str, ...] | None = None,
    codec: str = "MASKED",
    parts: tuple[str, ...] = (),
):
    message = SimpleNamespace(kind="AGREEMENT", private=True, codec=codec)
    rest = {"completed": completed, "messages": [message], "parts": parts}
    session = {"sites": sites, "protection": named(lost)}
    mine = [SimpleNamespace(site=one, session=session, **rest) for one in (of or sites)]
    return [*mine, SimpleNamespace(site="server", session=None, **rest)]


def test_the_lost_site_may_lack_a_log_of_what_was_not_completed_and_nobody_else() -> None:
    attempts = {("job", "a"): logs(ALL, False, of=LEFT), ("job", "b"): logs(LEFT, True, ("site-2",))}
    assert excused(attempts, "job") == {"site-2"} and not list(contradictions(attempts))
    assert not excused(attempts, "other")
    assert lost_of(attempts["job", "b"]) == {"site-2"} and named(()) == {} and SITES_FACT in named(("a",))


def test_an_attempt_that_was_not_completed_excuses_nobody() -> None:
    attempts = {("job", "a"): logs(ALL, False), ("job", "b"): logs(LEFT, False, ("site-2",))}
    assert not excused(attempts, "job")


@pytest.mark.parametrize(
    ("attempts", "match"),
    [
        ({("job", "b"): logs(LEFT, True, ("site-3",))}, "a site of its own"),
        ({("job", "a"): logs(ALL, False), ("job", "b"): logs(LEFT, True)}, "does not say that it went on without"),
        ({("job", "b"): [*logs(LEFT, True, ("site-2",)), *logs(LEFT, True)]}, "do not say alike"),
        (
            {("job", "a"): logs(LEFT, False), ("job", "b"): logs(LEFT, True, ("site-9",))},
            "without sites that no attempt had",
        ),
    ],
)
def test_what_cannot_be_together_is_named(attempts, match) -> None:
    (text,) = contradictions(attempts)
    assert match in text


def test_a_job_that_waited_says_nothing() -> None:
    attempts = {("job", "a"): logs(ALL, False), ("job", "b"): logs(ALL, True)}
    assert not list(contradictions(attempts)) and not excused(attempts, "job")


def test_an_attempt_that_ended_before_any_sum_binds_no_later_one() -> None:
    later = {("job", "b"): logs(LEFT, True)}
    assert not list(contradictions({("job", "a"): logs(ALL, False, codec="SEALED"), **later}))
    assert list(contradictions({("job", "a"): logs(ALL, False), **later}))


def test_logs_of_an_attempt_may_be_missing_only_before_any_sum_and_beside_one_that_completed_the_job() -> None:
    early, begun, whole = logs(ALL, False, codec="SEALED"), logs(ALL, False), logs(ALL, True)
    assert ended_early({("job", "a"): early, ("job", "b"): whole}, "job", "a")
    assert not ended_early({("job", "a"): begun, ("job", "b"): whole}, "job", "a")
    told = logs(ALL, False, codec="SEALED", parts=("SCHEMA",))
    assert not ended_early({("job", "a"): told, ("job", "b"): whole}, "job", "a")
    assert not ended_early({("job", "a"): early, ("other", "b"): whole}, "job", "a")
    assert not ended_early({("job", "a"): logs(ALL, True, codec="SEALED")}, "job", "a")
