"""Runs seeds: ``make simulate SEEDS=0-300 [KIND=horizontal] [JOBS=4]``. The last line is one JSON object."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.kind_cases import CASES
from tests.simulation.faults import Plan, plan_of
from tests.simulation.invariants import Trees, broken, results
from tests.simulation.world import Outcome, run_job


def play(kind: str, plan: Plan, folder: Path) -> Outcome:
    """Run the small job of a kind under a plan."""
    case = CASES[kind]
    parties = case.give(folder)
    recipe = case.recipe("job", **case.fields, sites=list(parties.sites))
    with plan.lie.at_work() if plan.lie is not None else nullcontext():
        return run_job(recipe, parties, plan.seed, plan.fate, plan.machines)


@functools.cache
def undisturbed(kind: str) -> Trees:
    """Return the results of a run that nothing befalls."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = play(kind, Plan(0), Path(folder))
        faults = broken(kind, Plan(0), outcome, {})
        if faults:
            raise AssertionError(f"{kind}, undisturbed: {faults}")
        return results(kind, outcome)


def simulate(kind: str, seed: int) -> tuple[Plan, Outcome, list[str]]:
    """Run one seed; return what befell it, how it ended, and what does not hold."""
    reference = undisturbed(kind)
    folder = Path(tempfile.mkdtemp(prefix=f"simulation_{kind}_{seed}_"))
    try:
        plan = plan_of(seed, SITES)
        outcome = play(kind, plan, folder)
        return plan, outcome, broken(kind, plan, outcome, reference)
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
        plan, outcome, faults = simulate(kind, seed)
        end = "completed" if outcome.reason is None else "ended"
    except AssertionError as error:  # the scheduler's
        plan, end, faults = plan_of(seed, SITES), "stood still", [str(error)]
    return Verdict(seed, kind, end, [f"{plan}", *faults] if faults else [])


def verdicts(cases: Sequence[tuple[str, int]], jobs: int) -> Iterator[Verdict]:
    """Run seeds, over several processes if there is more than one job, as they end."""
    if jobs == 1:
        yield from map(judged, cases)
        return
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=_RUNS_OF_A_PROCESS) as pool:
        yield from pool.imap_unordered(judged, cases)


def main() -> int:
    """Run the seeds that the command line names, over one kind or over all in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-99", help="first-last, or one")
    parser.add_argument("--kind", choices=list(CASES))
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    kinds = [options.kind] if options.kind else list(CASES)
    started, failures, ends = time.perf_counter(), [], Counter()
    for verdict in verdicts([(kinds[seed % len(kinds)], seed) for seed in seeds], options.jobs):
        ends[verdict.end] += 1
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
