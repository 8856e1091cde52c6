"""What a selection found: as JSON, as CSV, as a script that trains on the chosen columns, and for its page."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvflare_plugins.base.files import inert_csv, write_atomically
from nvflare_plugins.base.formatting import counted, number
from nvflare_plugins.data.labels import words_of_label
from nvflare_plugins.kinds.selection.job import Rule, SelectionJob
from nvflare_plugins.kinds.tuning.result import training_script
from nvflare_plugins.pages.run_record import ReportSection
from nvflare_plugins.pages.search_pages import (
    SELECTION_PAGE,
    SelectedColumn,
    SelectionFacts,
    SelectionStep,
    selection_html,
)
from nvflare_plugins.wire.envelope import is_larger_better

FILE_NAME, TABLE, STEPS, SCRIPT = "selection.json", "selection.csv", "selection_steps.csv", "train_chosen.py"
FORMAT = "veilboost-selection-1"
SURE = 0.05
"""Chance of one wrong verdict among all columns, if the trainings were independent."""


@dataclass(frozen=True, slots=True)
class OverFolds:
    """A number of each fold."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the folds."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        """Standard deviation over the folds (of a sample)."""
        return statistics.stdev(self.values)

    @property
    def standard_error(self) -> float:
        """Standard error of the mean, as if folds were independent."""
        return self.spread / math.sqrt(len(self.values))

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"mean": self.mean, "spread": self.spread, "folds": list(self.values)}


@dataclass(frozen=True, slots=True)
class Step:
    """One set of columns.

    Attributes:
        scores: the last metric on each fold.
        gain: of each of the columns, its share of the loss change of all trees.
        permutation: of each, by how much the fold's score gets worse; empty where it was not asked for.
        dropped: the columns that go after it, the least important first.
    """

    features: tuple[str, ...]
    scores: OverFolds
    gain: tuple[OverFolds, ...]
    permutation: tuple[OverFolds, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InformationValue:
    """What a column alone tells of the label (kinds/profile/site.py): by fold, in bins that all folds share.

    Attributes:
        by_chance: about what it would be in a fold if the column told nothing.
        bins: number of bins.
        at_least: some fold's value is a bound from below: rows of a class lie beyond a cut point where the others lack.
    """

    by_fold: OverFolds
    by_chance: float
    bins: int
    at_least: bool


@dataclass(frozen=True, slots=True)
class SelectionResult:
    """All steps in their order.

    Attributes:
        information: of each column; empty where it was not counted.
        hits: of each column, in how many trainings its gain was above that of every shadow column; empty without any.
        n_shadow_trainings: how many these were.
    """

    metric: str
    steps: tuple[Step, ...]
    information: Mapping[str, InformationValue] = field(default_factory=dict)
    hits: Mapping[str, int] = field(default_factory=dict)
    n_shadow_trainings: int = 0

    @property
    def best(self) -> int:
        """Place of the step with the best mean score; of equal ones that with fewer columns."""
        return max(range(len(self.steps)), key=lambda place: (self._merit(place), place))

    def chosen(self, rule: str) -> int:
        """Return the place of the chosen step."""
        least = self._merit(self.best)
        if rule == Rule.ONE_STANDARD_ERROR.value:
            least -= self.steps[self.best].scores.standard_error
        return max(place for place in range(len(self.steps)) if self._merit(place) >= least)

    def _merit(self, place: int) -> float:
        mean = self.steps[place].scores.mean
        return mean if is_larger_better(self.metric) else -mean

    def ranking(self) -> list[str]:
        """Return all columns: those of the last step by their importance, then from the last dropped to the first."""
        last = self.steps[-1]
        by = last.permutation or last.gain
        left = sorted(range(len(last.features)), key=lambda place: (-by[place].mean, place))
        gone = [name for step in self.steps for name in step.dropped]
        return [*(last.features[place] for place in left), *reversed(gone)]

    def agreed(self) -> bytes:
        """Return what all sites must have alike, to the last bit."""
        steps = [
            [one.features, one.scores.values, [g.values for g in one.gain], [p.values for p in one.permutation]]
            for one in self.steps
        ]
        information = {name: [one.by_fold.values, one.bins] for name, one in self.information.items()}
        return json.dumps([self.metric, steps, information, self.hits], sort_keys=True).encode()

    def verdict(self, name: str) -> str:
        """Return what the shadow columns say of a column: a binomial test, one error in twenty over all columns."""
        hits, n = self.hits[name], self.n_shadow_trainings
        per_column = SURE / len(self.hits)
        if _chance_of_at_least(hits, n) < per_column:
            return "above all shadows"
        return "not above them" if _chance_of_at_least(n - hits, n) < per_column else "open"


def _chance_of_at_least(hits: int, n: int) -> float:
    """Return the chance of so many heads of n fair coins."""
    return float(sum(math.comb(n, k) for k in range(hits, n + 1)) / 2**n)


class Selection:
    """Names and numbers of a selection that is over."""

    def __init__(self, result: SelectionResult, job: SelectionJob, job_id: str, n_sites: int) -> None:
        self.result, self._job, self._job_id, self._n_sites = result, job, job_id, n_sites
        self._chosen = result.chosen(job.rule)
        self._gone_after = {name: n for n, step in enumerate(result.steps, start=1) for name in step.dropped}

    @property
    def features(self) -> list[str]:
        """The chosen columns, in their order."""
        return list(self.result.steps[self._chosen].features)

    def document(self) -> dict[str, Any]:
        """Return ``selection.json``: the same at every site."""
        job, result = self._job, self.result
        return {
            "format": FORMAT,
            "job_id": self._job_id,
            "data_set": job.data_set,
            "label": job.label,
            "sites": self._n_sites,
            "metric": result.metric,
            "larger_is_better": is_larger_better(result.metric),
            "folds": job.folds,
            "importance": job.importance,
            "rule": job.rule,
            "chosen": self.features,
            "chosen_step": self._chosen + 1,
            "best_step": result.best + 1,
            "ranking": result.ranking(),
            "steps": [self._step(place) for place in range(len(result.steps))],
            "features": [self._entry(name) for name in result.ranking()],
        }

    def _step(self, place: int) -> dict[str, Any]:
        step = self.result.steps[place]
        by = step.permutation or step.gain
        return {
            "step": place + 1,
            "features": list(step.features),
            "dropped": list(step.dropped),
            "score": {**step.scores.document(), "standard_error": step.scores.standard_error},
            "importance": {name: one.mean for name, one in zip(step.features, by, strict=True)},
        }

    def _entry(self, name: str) -> dict[str, Any]:
        """Return what is known of a column; importances are those of the first step, with all columns."""
        first, result = self.result.steps[0], self.result
        place = first.features.index(name)
        found: dict[str, Any] = {
            "name": name,
            "chosen": name in self.features,
            "dropped_after": self._gone_after.get(name),
            "gain": first.gain[place].document(),
        }
        if first.permutation:
            found["permutation"] = first.permutation[place].document()
        if result.information:
            one = result.information[name]
            value = {**one.by_fold.document(), "by_chance": one.by_chance, "bins": one.bins, "at_least": one.at_least}
            found["information_value"] = value
        if result.hits:
            shadows = {"hits": result.hits[name], "of": result.n_shadow_trainings, "verdict": result.verdict(name)}
            found["shadows"] = shadows
        return found

    def table(self) -> str:
        """Return ``selection.csv``: a line for each column, the one kept longest first."""
        lines: list[list[Any]] = []
        for rank, entry in enumerate(self.document()["features"], start=1):
            cells = {"rank": rank, "feature": entry["name"], "chosen": entry["chosen"]}
            cells |= {"dropped_after_step": entry["dropped_after"] or ""}
            for key in ("information_value", "gain", "permutation"):
                if key in entry:
                    one = entry[key]
                    cells |= {f"{key}_mean": one["mean"], f"{key}_spread": one["spread"]}
                    cells |= {f"{key}_fold_{n}": value for n, value in enumerate(one["folds"], start=1)}
            if "shadows" in entry:
                cells |= {"shadow_hits": entry["shadows"]["hits"], "shadow_trainings": entry["shadows"]["of"]}
                cells |= {"shadow_verdict": entry["shadows"]["verdict"]}
            lines = lines or [list(cells)]
            lines.append(list(cells.values()))
        return inert_csv(lines).decode()

    def steps_table(self) -> str:
        """Return ``selection_steps.csv``: a line for each set of columns."""
        metric, folds = self.result.metric, range(1, self._job.folds + 1)
        head = ["step", "columns", f"mean_{metric}", "spread", "standard_error", *(f"fold_{n}" for n in folds)]
        lines: list[list[Any]] = [[*head, "best", "chosen", "dropped_after"]]
        for place, step in enumerate(self.result.steps):
            scores = step.scores
            numbers = [scores.mean, scores.spread, scores.standard_error, *scores.values]
            marks = [place == self.result.best, place == self._chosen, " ".join(step.dropped)]
            lines.append([place + 1, len(step.features), *numbers, *marks])
        return inert_csv(lines).decode()

    def script(self) -> str:
        """Return ``train_chosen.py``."""
        found = f"with the columns that selection {self._job_id} chose"
        return training_script(found, SCRIPT, "HorizontalXGBRecipe", self._job.settings_of(self.features))

    def facts(self) -> SelectionFacts:
        """Return what the page shows."""
        job, result = self._job, self.result
        steps = tuple(
            SelectionStep(len(one.features), one.scores.mean, one.scores.standard_error, one.dropped)
            for one in result.steps
        )
        columns = tuple(self._column(name) for name in result.ranking())
        return SelectionFacts(
            self._job_id,
            job.data_set,
            words_of_label(job.label),
            result.metric,
            is_larger_better(result.metric),
            self._n_sites,
            job.folds,
            job.importance,
            job.rule,
            steps,
            result.best,
            self._chosen,
            columns,
            result.n_shadow_trainings,
            self.script(),
        )

    def _column(self, name: str) -> SelectedColumn:
        first, result = self.result.steps[0], self.result
        place = first.features.index(name)
        by = (first.permutation or first.gain)[place]
        one = result.information.get(name)
        value = None if one is None else (one.by_fold.mean, one.by_fold.spread, one.by_chance, one.at_least)
        shadows = (result.hits[name], result.verdict(name)) if result.hits else None
        gone = self._gone_after.get(name)
        return SelectedColumn(name, name in self.features, gone, by.mean, by.spread, value, shadows)

    def write(self, folder: Path) -> None:
        """Write all of it into the run's folder."""
        contents = {
            FILE_NAME: json.dumps(self.document(), ensure_ascii=False, indent=1),
            TABLE: self.table(),
            STEPS: self.steps_table(),
            SCRIPT: self.script(),
            SELECTION_PAGE: selection_html(self.facts()),
        }
        for name, content in contents.items():
            write_atomically(folder / name, content.encode())

    def section(self) -> ReportSection:
        """Return the table for the run's report."""
        rows = tuple(
            (str(place + 1), str(len(one.features)), number(one.scores.mean), number(one.scores.spread))
            for place, one in enumerate(self.result.steps)
        )
        chosen = f"Chosen ({self._job.rule.replace('_', ' ')}): {', '.join(self.features)}."
        words = f"{self._job.folds} folds; {SELECTION_PAGE} has the pictures, {TABLE} and {STEPS} all numbers."
        head = ("step", "columns", f"mean {self.result.metric}", "spread")
        return ReportSection("Sets of columns", (chosen, words), head, rows)


def line_of(number_of: int, n_steps: int, metric: str, step: Step) -> str:
    """Return the line that says a step is done. Args: number_of: from 1."""
    gone = f"; without {', '.join(step.dropped)} from now on" if step.dropped else ""
    scores = step.scores
    return (
        f"step {number_of} of {n_steps}: {counted(len(step.features), 'column')}, {metric} {scores.mean:.6g} "
        f"(spread {scores.spread:.3g}){gone}"
    )
