"""What a tuning found, and what its page shows of that."""

from __future__ import annotations

import contextlib
import json
import math
import pprint
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nvflare_plugins.base.files import inert_csv, write_atomically
from nvflare_plugins.base.formatting import number
from nvflare_plugins.data.labels import words_of_label
from nvflare_plugins.kinds.tuning.job import Trial, Tuned
from nvflare_plugins.pages.run_record import ReportSection
from nvflare_plugins.pages.search_pages import TUNING_PAGE, TunedTrial, TuningFacts, tuning_html
from nvflare_plugins.wire.envelope import is_larger_better

# What a tuning found: scores of every trial on every fold, as JSON, as CSV, and as a script that trains the best.


FILE_NAME, TABLE, SCRIPT = "tuning.json", "tuning.csv", "train_best.py"
FORMAT = "veilboost-tuning-1"


@dataclass(frozen=True, slots=True)
class FoldScore:
    """One training's score on its fold.

    Attributes:
        score: the last metric at the best round (without early stopping: after the last).
        rounds: boosting rounds up to that one.
        trained: boosting rounds in all.
    """

    score: float
    rounds: int
    trained: int


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One parameter set. ``number`` counts from 1. Units: seconds, at this site."""

    number: int
    parameters: Trial
    folds: tuple[FoldScore, ...]
    seconds: float

    @property
    def mean(self) -> float:
        """Mean score over the folds."""
        return statistics.fmean(one.score for one in self.folds)

    @property
    def spread(self) -> float:
        """Standard deviation of the scores over the folds (of a sample)."""
        scores = [one.score for one in self.folds]
        return statistics.stdev(scores) if all(map(math.isfinite, scores)) else math.nan

    @property
    def rounds(self) -> int:
        """Rounds for a training over all rows: the mean of the folds', rounded."""
        return max(1, round(statistics.fmean(one.rounds for one in self.folds)))


@dataclass(frozen=True, slots=True)
class TuningResult:
    """All trials in their order. ``metric`` is the last of the job's."""

    metric: str
    trials: tuple[TrialResult, ...]

    def ranked(self) -> list[TrialResult]:
        """Return the trials, best mean first; what is no number last, equal ones in their order."""
        sign = -1.0 if is_larger_better(self.metric) else 1.0
        return sorted(self.trials, key=lambda one: (not math.isfinite(one.mean), sign * one.mean, one.number))

    @property
    def best(self) -> TrialResult:
        """The trial with the best mean."""
        return self.ranked()[0]

    def names(self) -> list[str]:
        """Return the parameters that some trial gives, in order of name."""
        return sorted({name for one in self.trials for name in one.parameters})

    def agreed(self) -> bytes:
        """Return what all sites must have alike, to the last bit."""
        rows = [[one.parameters, [[f.score, f.rounds, f.trained] for f in one.folds]] for one in self.trials]
        return json.dumps([self.metric, rows], sort_keys=True).encode()

    def document(self, job: Tuned, job_id: str) -> dict[str, Any]:
        """Return ``tuning.json``: the same at every site but for seconds."""
        return {
            "format": FORMAT,
            "job_id": job_id,
            "data_set": job.data_set,
            "label": job.label,
            "metric": self.metric,
            "larger_is_better": is_larger_better(self.metric),
            "folds": job.folds,
            "params": job.params,
            "best": {"trial": self.best.number, "params": self.best_params(job), "num_rounds": self.best.rounds},
            "trials": [
                {
                    "trial": one.number,
                    "params": one.parameters,
                    "mean": _number(one.mean),
                    "spread": _number(one.spread),
                    "num_rounds": one.rounds,
                    "folds": [{"score": _number(f.score), "rounds": f.rounds, "trained": f.trained} for f in one.folds],
                    "seconds": round(one.seconds, 3),
                }
                for one in self.trials
            ],
        }

    def best_params(self, job: Tuned) -> dict[str, Any]:
        """Return all XGBoost parameters of the best trial."""
        return {**job.params, **self.best.parameters}

    def table(self) -> str:
        """Return ``tuning.csv``: a line for each trial, the best first."""
        names, n_folds = self.names(), len(self.best.folds)
        folds = [f"fold_{number}" for number in range(1, n_folds + 1)]
        lines: list[list[Any]] = [
            ["rank", "trial", *names, f"mean_{self.metric}", "spread", "num_rounds", *folds, "seconds"]
        ]
        for rank, one in enumerate(self.ranked(), start=1):
            values = [one.parameters.get(name, "") for name in names]
            scores = [f.score for f in one.folds]
            lines.append([rank, one.number, *values, one.mean, one.spread, one.rounds, *scores, round(one.seconds, 3)])
        return inert_csv(lines).decode()

    def script(self, job: Tuned, job_id: str, features: Sequence[str]) -> str:
        """Return ``train_best.py``: the recipe of a training over all rows with the best parameters.

        Args:
            features: the columns of this job; a file has the column of groups besides.
        """
        found = f"what tuning {job_id} found best (trial {self.best.number})"
        settings = job.best_settings(self.best_params(job), self.best.rounds, features)
        return training_script(found, SCRIPT, job.best_recipe, settings)


def training_script(found: str, file: str, recipe: str, settings: Mapping[str, Any]) -> str:
    """Return a script that writes the job folder of a training over all rows.

    Args:
        found: what is trained, for people.
        file: name of the script.
        settings: arguments of the recipe of that name.
    """
    arguments = "".join(f"    {name}={_python(value)},\n" for name, value in settings.items())
    return (
        f'"""Train on all rows {found}.\n\n'
        f"    python {file}      writes the job folder jobs/best\n"
        '"""\n\n'
        f"from nvflare_plugins.recipes import {recipe}\n\n"
        f'recipe = {recipe}(\n    "best",\n{arguments})\n'
        'recipe.export("jobs")\n'
    )


def line_of(one: TrialResult, n_trials: int, metric: str, best: TrialResult) -> str:
    """Return the line that says a trial is done."""
    rounds = _range([fold.trained for fold in one.folds])
    return (
        f"trial {one.number} of {n_trials}: {metric} {one.mean:.6g} (spread {one.spread:.3g}) over {len(one.folds)} "
        f"folds, {rounds} rounds, {one.seconds:.1f} s; best so far: trial {best.number}, {best.mean:.6g}"
    )


def _range(numbers: Sequence[int]) -> str:
    return f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _python(value: Any) -> str:
    return pprint.pformat(value, width=100, sort_dicts=False).replace("\n", "\n    ")


# What a tuning's page and report show of its result.


_MOST_ROWS = 50


def facts_of(
    result: TuningResult, job: Tuned, job_id: str, n_sites: int, features: Sequence[str], n_trials: int
) -> TuningFacts:
    """Return what the page shows. Args: n_trials: how many there will be."""
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
        words_of_label(job.label),
        result.metric,
        is_larger_better(result.metric),
        n_sites,
        job.folds,
        trials,
        result.script(job, job_id, features),
        n_trials,
        f"{datetime.now(UTC):%H:%M:%S}",
    )


@contextlib.contextmanager
def without_page_if_lost(folder: Path) -> Iterator[None]:
    """Take away the page of a tuning that ends before its scores are agreed, and with it the word that it runs."""
    try:
        yield
    except BaseException:
        if not (folder / TABLE).exists():
            (folder / TUNING_PAGE).unlink(missing_ok=True)
        raise


def show_so_far(folder: Path, facts: TuningFacts) -> None:
    """Write the page while the tuning runs; where that cannot be, the tuning goes on without it."""
    with contextlib.suppress(OSError):
        write_atomically(folder / TUNING_PAGE, tuning_html(facts).encode())


def write_results(folder: Path, result: TuningResult, job: Tuned, facts: TuningFacts) -> None:
    """Write scores, table, script and page into the run's folder."""
    contents = {
        FILE_NAME: json.dumps(result.document(job, facts.job_id), indent=1),
        TABLE: result.table(),
        SCRIPT: facts.script,
        TUNING_PAGE: tuning_html(facts),
    }
    for name, content in contents.items():
        write_atomically(folder / name, content.encode())


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
