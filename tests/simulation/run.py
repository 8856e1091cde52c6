"""Runs seeds: ``make simulate SEEDS=0-300 [KIND=horizontal]``. The last line is one JSON object."""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext
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
        plan = plan_of(seed, ("site-1", "site-2", "site-3"))
        outcome = play(kind, plan, folder)
        return plan, outcome, broken(kind, plan, outcome, reference)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run the seeds that the command line names, over one kind or over all in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-99", help="first-last, or one")
    parser.add_argument("--kind", choices=list(CASES))
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    kinds = [options.kind] if options.kind else list(CASES)
    started, failures, ends = time.perf_counter(), [], {"completed": 0, "ended": 0}
    for seed in seeds:
        kind = kinds[seed % len(kinds)]
        try:
            plan, outcome, faults = simulate(kind, seed)
        except AssertionError as error:
            plan, outcome, faults = plan_of(seed, ("site-1", "site-2", "site-3")), None, [str(error)]
        ends["completed" if outcome is not None and outcome.reason is None else "ended"] += 1
        if faults:
            failures.append({"seed": seed, "kind": kind})
            sys.stdout.write(f"{kind}, seed {seed}: {plan}\n  " + "\n  ".join(faults) + "\n")
    seconds = time.perf_counter() - started
    sys.stdout.write(
        json.dumps({"seeds": len(seeds), "failures": failures, **ends, "seconds": round(seconds, 1)}) + "\n"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
