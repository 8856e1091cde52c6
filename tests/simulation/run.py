"""Runs seeds: ``make simulate SEEDS=0-300 [KIND=horizontal] [JOBS=4]``. The last line is one JSON object."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from tests.simulation.cases import CONTINUE, JOBS, STOP, job_of
from tests.simulation.faults import Plan, plan_of, plan_of_losses
from tests.simulation.invariants import Trees, after_return, broken, completed, given_away, over_all, results
from tests.simulation.prepared import give, recipe
from tests.simulation.watch import Watch, repeatable
from tests.simulation.world import Outcome, Submission, World
from tests.support.flare_job import JOB_ID
from tests.support.opened_sums import Opened


@dataclass
class Story:
    """What happened in a world.

    Attributes:
        jobs: that were submitted first; the second is the first one's twin.
        later: that were submitted when all machines were there again.
        opened: sums that were opened, of jobs that go on without a site.
    """

    jobs: list[Outcome]
    later: list[Outcome]
    watch: Watch
    opened: Opened


RESUMES = ("horizontal", "vertical", "private_trees")
"""Kinds that a lost job may be resumed of; of the others it is submitted anew."""

_CHECKPOINTED = ("horizontal", "vertical")


def play(kind: str, plan: Plan, folder: Path) -> Story:
    """Run the small job of a kind under a plan, with all that the plan wants of more."""
    parties = give(kind, folder)
    fields = {**JOBS[kind].case.fields, "sites": list(parties.sites)}
    fields |= {"checkpoint_every": 1} if plan.comes_back and JOBS[kind].kind in _CHECKPOINTED else {}
    world = World(plan.seed, parties, plan.fate, plan.machines)
    watch = Watch(lambda site: world.n_sent[site])
    with ExitStack() as stack:
        stack.enter_context(repeatable(plan.seed))
        stack.enter_context(watch.at_work())
        opened = Opened()
        if JOBS[kind].on_loss == CONTINUE:
            stack.enter_context(opened.at_work())
        lying = stack.enter_context(ExitStack())
        if plan.claim is not None:
            plan.claim.owner = lambda: world.scheduler.current.owner
        for liar in (plan.lie, plan.naming, plan.claim):
            if liar is not None:
                lying.enter_context(liar.at_work())
        stack.enter_context(world())
        submissions = [Submission(JOB_ID, recipe(kind, "job", **fields))]
        if plan.has_twin is not None:
            submissions.append(Submission("twin", recipe(kind, "twin", **fields), plan.has_twin))
        story = Story(world.run(submissions), [], watch, opened)
        if plan.comes_back and len(completed(story.jobs[0])) < len(parties.sites):
            story.later = _again(world, plan, kind, fields)
    return story


def _again(world: World, plan: Plan, kind: str, fields: dict[str, Any]) -> list[Outcome]:
    """Submit a lost job again: as one that goes on, where its kind can, and anew if that is refused."""
    plan.calm()
    for disk in world.disks.of.values():
        disk.room = None
    for owner in list(world.died):
        world.restart(owner)
    found = []
    if JOBS[kind].kind in RESUMES:
        found += world.run([Submission("again", recipe(kind, "again", **fields, resume_from=JOB_ID))])
        if found[0].reason is None:
            return found
    return [*found, *world.run([Submission("anew", recipe(kind, "anew", **fields))])]


_undisturbed: dict[str, Trees] = {}
shared_folder: Path | None = None
"""Where processes that have not started each other leave the results of undisturbed runs for each other."""


def undisturbed(kind: str) -> Trees:
    """Return the results of a run that nothing befalls: one for all seeds of a process, and of those that it starts."""
    if kind not in _undisturbed:
        kept = shared_folder / kind if shared_folder is not None else None
        if kept is not None and kept.exists():
            _undisturbed[kind] = {site: result.encode() for site, result in json.loads(kept.read_text()).items()}
        else:
            found = _undisturbed[kind] = _run_undisturbed(kind)
            if kept is not None:
                own = kept.with_name(f"{kind}.{os.getpid()}")
                own.write_text(json.dumps({site: result.decode() for site, result in found.items()}))
                own.rename(kept)
    return _undisturbed[kind]


def _run_undisturbed(kind: str) -> Trees:
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(0)
        story = play(kind, plan, Path(folder))
        faults = broken(kind, plan, story.jobs[0], {}) + story.watch.faults
        if faults:
            raise AssertionError(f"{kind}, undisturbed: {faults}")
        return results(kind, story.jobs[0])


def drawn(kind: str, seed: int) -> Plan:
    """Draw what befalls a job: of one that survives losses, losses above all."""
    on_loss = JOBS[kind].on_loss
    if on_loss == STOP:
        return plan_of(seed, SITES)
    return plan_of_losses(seed, SITES, on_loss, server_dies=kind == "horizontal_wait")


def simulate(kind: str, seed: int) -> tuple[Plan, Story, list[str]]:
    """Run one seed; return what befell it, how it ended, and what does not hold."""
    reference = undisturbed(kind)
    folder = Path(tempfile.mkdtemp(prefix=f"simulation_{kind}_{seed}_"))
    try:
        plan = drawn(kind, seed)
        story = play(kind, plan, folder)
        faults = [fault for job in story.jobs for fault in broken(kind, plan, job, reference)]
        faults += after_return(kind, plan, story.later, reference)
        faults += given_away(story.opened)
        faults += [*story.watch.faults, *over_all(kind, plan, story.jobs + story.later, story.watch)]
        return plan, story, list(dict.fromkeys(faults))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


SITES = ("site-1", "site-2", "site-3")
_RUNS_OF_A_PROCESS = 200  # what dead machines leave waits in its threads for ever


@dataclass(frozen=True)
class Verdict:
    """What came of a seed: how the job ended, and what does not hold, as lines for people."""

    seed: int
    kind: str
    end: str
    faults: list[str]


def judged(case: tuple[str, int]) -> Verdict:
    """Run one seed."""
    kind, seed = case
    logging.disable(logging.CRITICAL)  # the jobs' own logs
    try:
        plan, story, faults = simulate(kind, seed)
        ends = [*(["completed" if one.reason is None else "ended" for one in story.jobs])]
        ends += [
            "completed after its return" if one.reason is None else "refused after its return" for one in story.later
        ]
        end = ", ".join(ends)
    except AssertionError as error:  # the scheduler's
        plan, end, faults = drawn(kind, seed), "stood still", [str(error)]
    except Exception as error:
        plan, end, faults = drawn(kind, seed), "fell", [f"{type(error).__name__}: {error}"]
    return Verdict(seed, kind, end, [f"{plan}", *faults] if faults else [])


def _run_quietly(kind: str) -> Trees:
    logging.disable(logging.CRITICAL)
    return _run_undisturbed(kind)


def ends_at_once() -> None:
    """Let a process of a pool end although dead machines left threads that wait for ever."""
    Finalize(None, os._exit, args=(0,), exitpriority=-1)


def verdicts(cases: Sequence[tuple[str, int]], jobs: int) -> Iterator[Verdict]:
    """Run seeds in so many processes, as they end."""
    processes = multiprocessing.get_context("fork")
    gc.freeze()  # modules: no collection of a process that runs seeds goes over them
    kinds = sorted({kind for kind, _ in cases} - _undisturbed.keys())
    with processes.Pool(jobs, ends_at_once) as pool:  # never in this one, which those that run seeds are copies of
        _undisturbed.update(zip(kinds, pool.map(_run_quietly, kinds, chunksize=1), strict=True))
    with processes.Pool(jobs, ends_at_once, maxtasksperchild=_RUNS_OF_A_PROCESS) as pool:
        yield from pool.imap_unordered(judged, cases)


def main() -> int:
    """Run the seeds that the command line names, over one kind or over all in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-99", help="first-last, or one")
    parser.add_argument("--kind", choices=list(JOBS))
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    started, failures, ends = time.perf_counter(), [], Counter()
    cases = [(options.kind or job_of(seed), seed) for seed in seeds]
    for n_done, verdict in enumerate(verdicts(cases, options.jobs), start=1):
        ends[verdict.end] += 1
        if n_done % 1000 == 0:
            sys.stderr.write(f"{n_done} seeds, {len(failures)} failures, {time.perf_counter() - started:.0f} s\n")
        if verdict.faults:
            failures.append({"seed": verdict.seed, "kind": verdict.kind})
            sys.stdout.write(f"{verdict.kind}, seed {verdict.seed}: " + "\n  ".join(verdict.faults) + "\n")
            sys.stdout.flush()
    seconds = time.perf_counter() - started
    summary = {"seeds": len(seeds), "failures": failures, **ends, "seconds": round(seconds, 1)}
    sys.stdout.write(json.dumps(summary) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
