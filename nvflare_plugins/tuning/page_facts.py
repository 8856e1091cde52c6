"""What a tuning's page and report show of its result."""

from __future__ import annotations

from collections.abc import Sequence

from nvflare_plugins.formatting import number
from nvflare_plugins.report.run_record import ReportSection
from nvflare_plugins.report.tuning_page import TunedTrial, TuningFacts
from nvflare_plugins.tuning.result import Tuned, TuningResult
from nvflare_plugins.xgb.early_stopping import is_larger_better

_MOST_ROWS = 50


def facts_of(result: TuningResult, job: Tuned, job_id: str, n_sites: int, features: Sequence[str]) -> TuningFacts:
    """Return what the page shows."""
    trials = tuple(
        TunedTrial(
            one.number,
            tuple((name, value if isinstance(value, str) else float(value)) for name, value in one.parameters.items()),
            one.mean,
            one.spread,
            tuple(fold.score for fold in one.folds),
            one.rounds,
        )
        for one in result.ranked()
    )
    return TuningFacts(
        job_id,
        job.data_set,
        job.label,
        result.metric,
        is_larger_better(result.metric),
        n_sites,
        job.folds,
        trials,
        result.script(job, job_id, features),
    )


def section_of(facts: TuningFacts) -> ReportSection:
    """Return the table for the run's report."""
    rows = tuple(
        (str(one.number), one.text, number(one.mean), number(one.spread), str(one.rounds))
        for one in facts.trials[:_MOST_ROWS]
    )
    more = len(facts.trials) - len(rows)
    words = f"{facts.n_folds} folds; tuning.html has the pictures, tuning.csv all scores."
    return ReportSection(
        "Trials, the best first",
        (words + (f" {more} further trials are there." if more else ""),),
        ("trial", "parameters", f"mean {facts.metric}", "spread", "rounds"),
        rows,
    )
