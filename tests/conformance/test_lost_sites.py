"""Every kind of job that waits, under controller and executors: a process dies, and another comes in its place."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.message import Message
from nvflare.fuel.utils.class_utils import instantiate_class

from dp_components.ledger import Ledger
from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import LOST_SITE_FIELDS
from nvflare_plugins.attempt.late_end import ENDED_LATE
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.flare import controller as controllers
from nvflare_plugins.flare import executor as executors
from nvflare_plugins.flare import timeouts
from nvflare_plugins.flare.attempt import COMPLETED, FAILED, INTERRUPTED
from nvflare_plugins.flare.controller import TRAIN_TASK
from nvflare_plugins.flare.kept_jobs import NOTE
from nvflare_plugins.flare.kinds import KINDS
from nvflare_plugins.flare.transport import TOPIC_FRAME
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.recipes.recipe import JobRecipe
from nvflare_plugins.site.data_refusals import Question, RefusalCount
from nvflare_plugins.site.memory.registry import Registry
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.setup import set_up
from tests.conformance.kind_cases import CASES
from tests.support.federation import Parties
from tests.support.flare_job import JOB_ID, Finished, _Context, components
from tests.support.flare_network import FakeCell, Network

KINDS_THAT_WAIT = sorted(
    name
    for name, kind in KINDS.items()
    if set(LOST_SITE_FIELDS) <= set(kind.job.__dataclass_fields__)
    and name != "vertical_inference"  # only where it stays, which ends when somebody says so: tests/poc/test_serving.py
)
LOST = "site-2"
FRAMES = {"private_trees": (7, 5), "dpboost": (7, 5)}  # a small job has few


@pytest.fixture(autouse=True)
def _nobody_waits_long_for_a_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "Ready", partial(executors.Ready, interval_s=0.1))
    monkeypatch.setattr(timeouts, "EXPIRE_POLL_S", 0.05)
    monkeypatch.setattr(timeouts, "REMIND_INTERVAL_S", 0.5)


class Federation:
    """A job's server and sites, each in threads; FLARE's part is what this class does.

    Args:
        dies_after: frames that the lost site sends before its process dies, for each of its processes in turn.
        comes_back: another process is started in the place of one that died.
    """

    def __init__(self, recipe: JobRecipe, parties: Parties, dies_after: list[int], comes_back: bool = True) -> None:
        self.controller, self._executor = components(recipe, parties.folder / "exported")
        self._parties, self._dies_after, self._comes_back = parties, dies_after, comes_back
        self._network, self._signal = Network(longest_s=0.0002), Signal()
        self._server = parties.folder / "server"
        self._frames: set[tuple[object, ...]] = set()
        self._threads: list[threading.Thread] = []
        self._dead: set[object] = set()
        self._over = threading.Event()
        self.tasks: dict[str, Any] = {}
        self.reports: list[tuple[str, int, dict[str, Any]]] = []

    def root(self, owner: str) -> Path:
        return self._server if owner == "server" else self._parties.workspace(owner)

    def run(self) -> Finished:
        parties, said = self._parties, []
        for root in map(self.root, ("server", *parties.sites)):
            set_up(root)
            (root / JOB_ID).mkdir(exist_ok=True)  # FLARE makes it
        self._network.rule = self._rule
        clients = [SimpleNamespace(name=site, token=site, get_fqcn=lambda site=site: site) for site in parties.sites]
        cell = FakeCell(self._network, f"server.{JOB_ID}")
        context = self._context = _Context("server", self._server, cell, get_clients=lambda: clients)
        controller = self.controller
        controller._engine, controller._task_check_period = context.engine, 0.02
        controller.broadcast, controller.cancel_task = self._broadcast, lambda task: None
        controller.system_panic = lambda reason, fl_ctx: said.append(reason)
        controller.control_flow(self._signal, context)
        self._over.set()
        for thread in self._threads:
            thread.join()
        return Finished(parties, self._server, said[0] if said else None, {}, {})

    def _broadcast(self, task: Any, targets: list[str], **_: Any) -> None:
        is_first = not self.tasks
        self.tasks.update(dict.fromkeys(targets, task))
        for site in self._parties.sites if is_first else ():
            self._start(site)

    def _start(self, site: str) -> None:
        self._threads.append(threading.Thread(target=self._process, args=(site,)))
        self._threads[-1].start()

    def _process(self, site: str) -> None:
        """Be a site's process: take what task there is, hand its report over, look for the next."""
        component = instantiate_class(self._executor["path"], self._executor["args"])
        cell = FakeCell(self._network, f"{site}.{JOB_ID}", site)
        own = _Context(site, self._parties.workspace(site), cell)
        component.handle_event(EventType.START_RUN, own)
        done = None
        while not self._over.is_set() and cell not in self._dead:
            task = self.tasks.get(site)
            if task is done:
                self._over.wait(0.02)
                continue
            reply = component.execute(TRAIN_TASK, Shareable(json.loads(json.dumps(task.data))), own, self._signal)
            done = task
            if cell not in self._dead:
                self.reports.append((site, task.data.get("number", 0), dict(reply)))
                client = SimpleNamespace(name=site)
                task.result_received_cb(SimpleNamespace(client=client, result=reply), own)
                component.handle_event(EventType.AFTER_SEND_TASK_RESULT, own)
        if cell not in self._dead:
            component.handle_event(EventType.END_RUN, own)
            return
        component._ready.end()
        component._beats.stop()
        if self._comes_back:
            self._start(site)
        else:  # in the end FLARE notices
            self._context.set_prop(FLContextKey.DISCONNECTED_CLIENT_NAME, site, private=True, sticky=False)
            self.controller.handle_event(EventType.CLIENT_DISCONNECTED, self._context)

    def kill(self, site: str) -> None:
        """Let a site's process be dead from here on."""
        self._dead.add(self._network.cells[f"{site}.{JOB_ID}"])

    def _rule(self, origin: str, topic: str, message: Message) -> int:
        cell = self._network.cells[origin]
        if cell in self._dead:
            raise RuntimeError("the process is dead")
        if topic == TOPIC_FRAME and origin == f"{LOST}.{JOB_ID}" and self._dies_after:
            self._frames.add(tuple(message.headers["veilboost"]))
            if len(self._frames) > self._dies_after[0]:
                self._frames.clear()
                self._dies_after.pop(0)
                self._dead.add(cell)
                raise RuntimeError("the process is dead")
        return 1


def waiting(name: str, **fields: Any) -> JobRecipe:
    case = CASES[name]
    return case.recipe(name, **{**case.least, **case.fields, "on_lost_site": "wait", **fields})


@pytest.mark.parametrize("name", KINDS_THAT_WAIT)
def test_a_job_survives_processes_that_die_and_all_its_evidence_holds(tmp_path: Path, name: str) -> None:
    federation = Federation(waiting(name), CASES[name].give(tmp_path), list(FRAMES.get(name, (12, 9))))
    finished = federation.run()
    assert finished.reason is None, finished.reason
    assert finished.summary["status"] == COMPLETED and finished.summary["attempts"] == 3
    last = [report["status"] for _, number, report in federation.reports if number == 3]
    assert last == [COMPLETED] * len(finished.parties.sites)
    # FLARE gives the task of a dead process to the one in its place, which says so and takes no part.
    again = [report for site, number, report in federation.reports if site == LOST and number < 3]
    assert {report["status"] for report in again} <= {INTERRUPTED, FAILED} and again[0]["status"] == INTERRUPTED
    assert not list(tmp_path.rglob(NOTE))
    evidence = verify([finished.evidence.parent])
    assert evidence.sound, [audit.failures for audit in evidence.attempts]
    assert len(evidence.attempts) == 3 and [audit.completed for audit in evidence.attempts].count(True) == 1
    for site in finished.parties.sites:
        assert "Attempt 3" in " ".join(json.loads((finished.folder(site) / "run.json").read_text())["notes"])


def test_a_site_that_does_not_come_back_ends_the_job_at_its_deadline(tmp_path: Path) -> None:
    recipe = waiting("horizontal", lost_site_deadline_s=0.5)
    federation = Federation(recipe, CASES["horizontal"].give(tmp_path), [12], comes_back=False)
    finished = federation.run()
    assert f"not back within lost_site_deadline_s (0.5 s): {LOST}" in finished.reason
    assert finished.summary["status"] == FAILED and finished.reason.endswith(finished.summary["reason"])
    assert not list(tmp_path.rglob("model.json"))


@pytest.mark.parametrize("on_loss", ["wait", "continue"])
def test_in_flares_simulator_nobody_is_waited_for_and_the_job_says_so_at_once(
    tmp_path: Path, monkeypatch, on_loss
) -> None:
    """It starts a site's process once, and no other process of it ever comes (tests/integration has the real one)."""
    monkeypatch.setattr(controllers.SimulatorConstants, "JOB_NAME", JOB_ID)
    recipe, parties = going_on(tmp_path, on_lost_site=on_loss, lost_site_deadline_s=3600.0)
    finished = Federation(recipe, parties, [IN_TRAINING], comes_back=False).run()
    assert "FLARE's simulator starts no site's process again" in finished.reason and LOST in finished.reason
    assert finished.summary["status"] == FAILED and not list(tmp_path.rglob("model.json"))


def test_a_process_that_always_dies_ends_the_job(tmp_path: Path) -> None:
    finished = Federation(waiting("horizontal", most_attempts=3), CASES["horizontal"].give(tmp_path), [3] * 9).run()
    assert "the last that a job has" in finished.reason and finished.summary["attempts"] == 3


# -- what time mends ---------------------------------------------------------------------------------------------------


def full_for_a_while(
    monkeypatch: pytest.MonkeyPatch, federation: Federation, owner: str, first: int, n: int
) -> list[str]:
    """Let the disk of a machine refuse n changes, once the job has begun, from that number on; return which it refused.

    Changes are what ``os`` is asked to write, sync or rename; SQLite's pass Python by.
    """
    n_changes, folder, refused = itertools.count(1), federation.root(owner), list[str]()

    def refusing(change: Callable[..., Any], what: object, *of: Any, **named: Any) -> Any:
        path = Path(os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fsdecode(what))
        if federation.tasks and path.is_relative_to(folder) and first <= next(n_changes) < first + n:
            refused.append(f"{change.__name__} {path.name}")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return change(what, *of, **named)

    for change in (os.write, os.fsync, os.replace):
        monkeypatch.setattr(os, change.__name__, partial(refusing, change))
    monkeypatch.setattr(timeouts, "FIRST_PAUSE_S", 0.05)
    return refused


@pytest.mark.parametrize("name", KINDS_THAT_WAIT)
def test_a_full_disk_pauses_a_job_and_costs_nothing(tmp_path: Path, monkeypatch, name: str) -> None:
    finished, _ = run_with_a_full_disk(tmp_path, monkeypatch, name, LOST, 7, 6)
    assert finished.summary["attempts"] > 1
    if name == "horizontal":
        monkeypatch.undo()
        whole = Federation(waiting(name), CASES[name].give(tmp_path / "whole"), []).run()
        boosters = [json.loads((one.folder(LOST) / "model.json").read_text())["learner"] for one in (finished, whole)]
        assert boosters[0]["gradient_booster"] == boosters[1]["gradient_booster"]


PARTS = 8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("owner", [LOST, "server"])
@pytest.mark.parametrize("name", KINDS_THAT_WAIT)
def test_a_disk_that_is_full_at_any_moment_ends_no_job(tmp_path: Path, name: str, owner: str, part: int) -> None:
    """One change after the other is refused, in a job for each, until none is left: ten minutes of a core for all."""
    for number in itertools.count(1 + part, PARTS):
        with pytest.MonkeyPatch.context() as monkeypatch:
            folder = tmp_path / str(number)
            _, refused = run_with_a_full_disk(folder, monkeypatch, name, owner, number, 1)
        shutil.rmtree(folder)
        if not refused:
            break
    assert number > 15, "a job changes more"


def run_with_a_full_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, owner: str, first: int, n: int
) -> tuple[Finished, list[str]]:
    """Run a job while a disk refuses changes; hold that it ends well and costs what it does else."""
    parties = CASES[name].give(folder)
    federation = Federation(waiting(name), parties, [])
    refused = full_for_a_while(monkeypatch, federation, owner, first, n)
    finished = federation.run()
    assert finished.reason is None, (first, refused, finished.reason)
    evidence = verify([finished.evidence.parent])
    assert evidence.sound, (first, refused, [audit.failures for audit in evidence.attempts])
    for site in parties.sites:
        assert any((finished.folder(site) / one).is_file() for one in CASES[name].results), (first, refused)
        count = RefusalCount(SitePolicy.load(parties.workspace(site), site))
        assert not any(count.counts(question) for question in Question)
        for ledger in parties.workspace(site).rglob("*.ledger"):
            assert 0 < Ledger(ledger).job_spent(JOB_ID).epsilon(1e-6) <= 1.0001 * CASES[name].fields["epsilon"]
    return finished, refused


@pytest.mark.parametrize(("name", "is_closed"), [*((name, False) for name in KINDS_THAT_WAIT), ("horizontal", True)])
def test_a_process_that_dies_when_all_sites_have_the_result_costs_nothing(
    tmp_path: Path, monkeypatch, name: str, is_closed: bool
) -> None:
    """Between the last exchange and the report: the next process ends evidence, memory, ledger and record."""
    parties, write_record, died = CASES[name].give(tmp_path), SiteAttempt.write_record, list[bool]()
    federation = Federation(waiting(name), parties, [])

    def dying(attempt: SiteAttempt, *of: Any, **facts: Any) -> None:
        if attempt.channel.site != LOST or is_closed:
            write_record(attempt, *of, **facts)
        if attempt.channel.site == LOST and not died:
            died.append(True)
            attempt.evidence.let_go()
            monkeypatch.setattr(attempt.evidence, "abandon", lambda reason: None)
            federation.kill(LOST)
            raise JobAborted("the process is dead")

    monkeypatch.setattr(SiteAttempt, "write_record", dying)
    finished = federation.run()
    assert died and finished.reason is None, finished.reason
    assert finished.summary["attempts"] == 1 and not list(tmp_path.rglob(NOTE))
    assert finished.summary["sites"][LOST]["summary"]["note"] == ENDED_LATE
    evidence = verify([finished.evidence.parent])
    assert evidence.sound and evidence.attempts[0].completed, [audit.failures for audit in evidence.attempts]
    run = finished.folder(LOST)
    assert any((run / result).is_file() for result in CASES[name].results) and not list(run.glob("checkpoint-*"))
    assert is_closed is (ENDED_LATE not in RunRecord.read(run).notes) and (run / "report.html").is_file()
    assert not [one for one in tmp_path.rglob("*") if one.suffix in (".partial", ".reserve")]
    policy = SitePolicy.load(parties.workspace(LOST), LOST)
    assert {one["state"] for one in Registry.open(policy).runs()} <= {"complete"}
    for ledger in policy.ledgers.rglob("*.ledger"):
        assert [one.state for one in Ledger(ledger, policy.ledger_heads).history().jobs] == ["closed"]
    assert not any((run / kept).exists() for kept in KINDS[name].kept)


def test_a_disk_that_stays_full_ends_the_job_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parties = CASES["horizontal"].give(tmp_path)
    federation = Federation(waiting("horizontal", lost_site_deadline_s=4.0), parties, [])
    full_for_a_while(monkeypatch, federation, LOST, 12, 1 << 30)
    finished = federation.run()
    assert f"not back within lost_site_deadline_s (4 s): {LOST}" in finished.reason and "(ENOSPC)" in finished.reason
    lines = [one for one in map(logging.LogRecord.getMessage, caplog.records) if "the job waits for" in one]
    assert len(lines) == 1 + len(parties.sites), "the server and every site say so"
    for line in lines:
        assert re.search(
            f"waits for {LOST}, until [-0-9]+ [:0-9]+ UTC by the server's clock: {LOST}: the disk is", line
        )
        assert str(tmp_path) not in line


def test_attempts_are_as_many_as_the_job_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parties = CASES["horizontal"].give(tmp_path)
    federation = Federation(waiting("horizontal", most_attempts=2), parties, [])
    full_for_a_while(monkeypatch, federation, LOST, 12, 1 << 30)
    monkeypatch.setattr(executors, "takes_files", lambda folder: True)
    finished = federation.run()
    assert "attempt 2, the last that a job has" in finished.reason and finished.summary["attempts"] == 2


def test_the_servers_full_disk_pauses_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parties = CASES["horizontal"].give(tmp_path)
    federation = Federation(waiting("horizontal"), parties, [])
    full_for_a_while(monkeypatch, federation, "server", 1, 5)
    finished = federation.run()
    assert finished.reason is None, finished.reason
    assert len({(finished.folder(site) / "model.json").read_bytes() for site in parties.sites}) == 1


# -- jobs that go on without the lost site ----------------------------------------------------------------------------

LEFT = ("site-1", "site-3")
CONSENTS = ("continue_without_site", "fewer_than_three_sites")
IN_TRAINING = 50  # frames: two rounds are done then


def going_on(tmp_path: Path, **fields: Any) -> tuple[JobRecipe, Parties]:
    """Return a job that two of three sites may end, with metrics of rounds, and its sites, which consent."""
    case = CASES["horizontal"]
    parties = case.give(tmp_path)
    for site in parties.sites:
        consents = {**parties.policy_of(site)["consents"], **dict.fromkeys(CONSENTS, True)}
        parties.set_policy(site, consents=consents, min_effective_rows=10, min_sites=2, max_colluders=0)
    document = {**case.least, **case.fields, "num_rounds": 6, "on_lost_site": "continue", **fields}
    return case.recipe("horizontal", **document, min_clients=2), parties


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "GO_ON_AFTER_S", 0.3)
    monkeypatch.setattr(timeouts, "GIVE_UP_AFTER_S", 60.0)


@pytest.mark.usefixtures("impatient")
def test_a_job_goes_on_without_a_site_that_is_gone_for_good(tmp_path: Path) -> None:
    recipe, parties = going_on(tmp_path)
    federation = Federation(recipe, parties, [IN_TRAINING], comes_back=False)
    finished = federation.run()
    assert finished.reason is None, finished.reason
    summary = finished.summary
    assert (summary["status"], summary["attempts"], summary["without"]) == (COMPLETED, 2, [LOST])
    assert {site for site, number, _ in federation.reports if number == 2} == set(LEFT)
    models = {(finished.folder(site) / "model.json").read_bytes() for site in LEFT}
    assert len(models) == 1 and not (finished.folder(LOST) / "model.json").exists()
    said = json.loads(json.loads(models.pop())["learner"]["attributes"]["veilboost_trained_by"])
    assert [part["sites"] for part in said["parts"]] == [list(parties.sites), list(LEFT)]
    evidence = verify([finished.evidence.parent])
    assert evidence.sound, (evidence.failures, [audit.failures for audit in evidence.attempts])
    assert any(f"{LOST} was lost and handed in no log" in note for audit in evidence.attempts for note in audit.notes)
    assert f"without {LOST}" in " ".join(json.loads((finished.folder(LEFT[0]) / "run.json").read_text())["notes"])


class Returning(Federation):
    """The lost site's machine is up again once the others train without it; they are slow until it is told."""

    def _rule(self, origin: str, topic: str, message: Message) -> int:
        attempt = self.controller._attempt
        if topic == TOPIC_FRAME and attempt.number == 2 and attempt.has_trained:
            with self._lock:
                if not self._is_back:
                    self._is_back = True
                    self.tasks.pop(LOST)
                    self._start(LOST)
            self._over.wait(0.0 if self.told else 0.2)
        return super()._rule(origin, topic, message)

    _lock, _is_back = threading.Lock(), False

    @property
    def told(self) -> list[dict[str, Any]]:
        return [report for site, _, report in self.reports if site == LOST and "goes on without" in report["error"]]


@pytest.mark.usefixtures("impatient")
def test_a_site_that_comes_back_later_is_told_and_hands_in_its_evidence(tmp_path: Path) -> None:
    recipe, parties = going_on(tmp_path, num_rounds=8)
    federation = Returning(recipe, parties, [IN_TRAINING], comes_back=False)
    finished = federation.run()
    assert finished.reason is None, finished.reason
    (told,) = federation.told
    assert "site-1, site-3" in told["error"] and LOST in told["error"]
    assert not (finished.folder(LOST) / "model.json").exists()
    assert not list(parties.workspace(LOST).rglob(NOTE))
    evidence = verify([finished.evidence.parent])
    assert evidence.sound, (evidence.failures, [audit.failures for audit in evidence.attempts])
    assert not any("handed in no log" in note for audit in evidence.attempts for note in audit.notes)


@pytest.mark.usefixtures("impatient")
def test_a_job_that_cannot_go_on_without_the_site_waits_for_it(tmp_path: Path) -> None:
    """Nothing is trained yet: there is no state to go on from, and the job ends at the deadline of waiting."""
    recipe, parties = going_on(tmp_path, lost_site_deadline_s=2.0)
    finished = Federation(recipe, parties, [12], comes_back=False).run()
    assert f"not back within lost_site_deadline_s (2 s): {LOST}" in finished.reason
    assert finished.summary["attempts"] == 2 and not list(tmp_path.rglob("model.json"))


@pytest.mark.usefixtures("impatient")
def test_a_process_that_is_back_soon_is_not_left_out(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(timeouts, "GO_ON_AFTER_S", 60.0)
    recipe, parties = going_on(tmp_path)
    finished = Federation(recipe, parties, [IN_TRAINING]).run()
    assert finished.reason is None and finished.summary["without"] == []
    assert len({(finished.folder(site) / "model.json").read_bytes() for site in parties.sites}) == 1


@pytest.mark.usefixtures("impatient")
def test_too_few_sites_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers.JobController, "_check_can_be_fewer", lambda self, job, n_sites: None)
    recipe, parties = going_on(tmp_path, lost_site_deadline_s=1.0)
    federation = Federation(recipe, parties, [IN_TRAINING], comes_back=False)
    federation.controller.min_clients = 3
    finished = federation.run()
    assert "not back within" in finished.reason and finished.summary["attempts"] == 1


def test_a_job_that_could_never_go_on_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """The default of min_clients is 3, and FLARE gives the job three sites: no one could be missing."""
    _, parties = going_on(tmp_path)
    case = CASES["horizontal"]
    recipe = case.recipe("horizontal", **{**case.least, **case.fields, "on_lost_site": "continue"})
    federation = Federation(recipe, parties, [IN_TRAINING], comes_back=False)
    finished = federation.run()
    assert "could never go on: the job has 3 sites, and 3 must be left. Remedy: min_clients" in finished.reason
    assert not list(tmp_path.rglob("course.json"))
    assert {report["error"].partition(",")[0] for _, _, report in federation.reports} == {
        "the job ends before it began"
    }, "sites hear why, and nothing else"


def test_a_recipe_that_leaves_no_site_to_lose_is_refused() -> None:
    case = CASES["horizontal"]
    sites = [f"site-{n}" for n in (1, 2, 3)]
    with pytest.raises(ConfigurationError, match="no site could be missing"):
        case.recipe("horizontal", **{**case.least, "on_lost_site": "continue"}, sites=sites)
