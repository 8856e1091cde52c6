"""What a model's structure tells of a site's rows, judged by the site's rules: before it may leave, and for a dossier.

The checks are those of SACRO-ML's structural attack: residual degrees of freedom, settings that make models easy to
attack, how many rows share a prediction (k-anonymity), small cells, certainty; and beside them the rows behind each
leaf, and groups of one class. Rows are the site's own. Those of other sites make groups and leaves larger, never
smaller, so that what holds here holds of the pooled rows too.

A differentially private model is judged by its accounted privacy in place of all these: that bounds what anybody learns
of a person from it, however few rows share a leaf.

Privacy: figures over all rows at the site's own hand; no row, score or position of one. The command sends nothing.

Reference: AI-SDC/SACRO-ML, sacroml/attacks/structural_attack.py; its study of settings: arXiv:2502.09396.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_components.ledger import LedgerHistory
from he_processors.errors import ConfigurationError
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.labels import is_labelled
from nvflare_plugins.data.table import Table
from nvflare_plugins.dossier.parts import histories
from nvflare_plugins.evidence.reader import Log
from nvflare_plugins.evidence.threat_model import is_horizontal
from nvflare_plugins.pages.report import own_evidence
from nvflare_plugins.pages.run_record import TRAINING, DataFacts, RunRecord
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.scoring.rows import load_again
from nvflare_plugins.site.memory.registry import Registry
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_values import ReleaseRules, is_private
from nvflare_plugins.xgb.model_json import leaf_size
from nvflare_plugins.xgb.objectives import objective_facts

_NOT_JUDGED = "not judged"
_NEAR_ZERO = 1e-8  # a probability that SACRO-ML takes for zero
_COVER_SLACK = 1e-5  # sums of hessians are float32
_BLOCK_VALUES = 4_000_000  # leaves looked at in one go
_ENOUGH_CHILD_WEIGHT = ((3, -1.0), (12, 1.5), (62, 3.0))
"""Up to so many rounds a larger ``min_child_weight`` than that is enough."""
_MOST_CHILD_WEIGHT, _SAFE_DEPTH, _DEFAULT_DEPTH = 6.0, 3, 6

Counts = NDArray[np.int64]


# -- what is measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows by what the model predicts for them.

    Attributes:
        n_groups, smallest: groups, and the rows of the smallest.
        in_small: rows in groups below the least size.
        in_small_cells, certain: rows in groups of which the model states few rows of a class; of which it excludes a
            class. None of a model without probabilities.
        in_one_class: rows in groups that are not small and have one class; None of a regression.
    """

    n_groups: int
    smallest: int
    in_small: int
    in_small_cells: int | None = None
    certain: int | None = None
    in_one_class: int | None = None


@dataclass(frozen=True, slots=True)
class Leaves:
    """Leaves that rows of the site reach.

    Attributes:
        smallest: fewest rows that one of them is known to hold.
        n_small: leaves below the least number.
        n_one_class: leaves whose rows of the site all have one class; None of a regression.
        n_rows: rows that the model is known to have been trained on: the site's own, or more of all sites.
    """

    n_leaves: int
    smallest: int
    n_small: int
    n_one_class: int | None
    n_rows: int


def group_rows(model: FinishedModel, table: Table, least: int) -> Groups:
    """Return the groups of a table's rows, of which there are some, with equal predictions of the whole model.

    Args:
        least: fewest rows that a group should have.
    """
    if model.has_probabilities:
        predictions = model.probabilities(table.features)
    else:
        predictions = model.predict(table.features, output_margin=True).reshape(table.n_rows, -1) + np.float32(0)
    _, first, group, sizes = np.unique(_keys(predictions), return_index=True, return_inverse=True, return_counts=True)
    is_small = sizes < least
    found = Groups(sizes.size, int(sizes.min()), int(sizes[is_small].sum()))
    if model.classes is None:
        return found
    of_classes = _by_class(group, table.label, len(model.classes), sizes.size)
    is_one_class = ~is_small & (of_classes.max(axis=1) == sizes)
    one_class = int(sizes[is_one_class].sum())
    if not model.has_probabilities:
        return replace(found, in_one_class=one_class)
    stated = predictions[first] * sizes[:, None]
    has_cell = ((stated > 0) & (stated < least)).any(axis=1)
    is_certain = (predictions[first] <= _NEAR_ZERO).any(axis=1)
    return replace(
        found,
        in_small_cells=int(sizes[has_cell].sum()),
        certain=int(sizes[is_certain].sum()),
        in_one_class=one_class,
    )


def _keys(predictions: NDArray[np.float32]) -> NDArray[Any]:
    """Return one value a row that is equal where predictions are.

    Shapes: predictions: float32[n_rows, n]; result: [n_rows].
    """
    if predictions.shape[1] <= 2:  # of two classes the second's says all
        return predictions[:, -1]
    whole = np.ascontiguousarray(predictions)
    return whole.view(np.dtype((np.void, whole.itemsize * whole.shape[1])))[:, 0]


def _by_class(place: Counts, label: NDArray[np.float32], n_classes: int, n: int) -> Counts:
    """Count rows by place and class. Shapes: place, label: [n_rows]; result: int64[n, n_classes]."""
    return np.bincount(place * n_classes + label.astype(np.int64), minlength=n * n_classes).reshape(n, n_classes)


def leaves_reached(model: FinishedModel, table: Table, least: int, hessian_bound: float | None) -> Leaves:
    """Return what is known of the leaves that a table's rows, of which there are some, reach.

    Args:
        least: fewest rows that a leaf should hold.
        hessian_bound: largest hessian of a row; a leaf of all sites' rows holds at least its cover divided by it. None
            where covers are not sums over rows, or hessians have no bound.
    """
    trees = model.trees
    starts = np.cumsum([0, *(len(tree["left_children"]) for tree in trees)])
    n_classes = 1 if model.classes is None else len(model.classes)
    label = np.zeros(table.n_rows, np.float32) if model.classes is None else table.label
    counts = np.zeros((int(starts[-1]), n_classes), np.int64)
    step = max(1, _BLOCK_VALUES // len(trees))
    for begin in range(0, table.n_rows, step):
        rows = slice(begin, begin + step)
        places = model.leaves(table.features[rows]) + starts[:-1]
        counts += _by_class(places.ravel(), np.repeat(label[rows], len(trees)), n_classes, len(counts))
    own = counts.sum(axis=1)
    known, n_rows = own, table.n_rows
    if hessian_bound is not None:
        covers = np.concatenate([np.asarray(tree["sum_hessian"], np.float64) for tree in trees])
        proven = np.ceil(covers / hessian_bound * (1 - _COVER_SLACK)).astype(np.int64)
        known, n_rows = np.maximum(own, proven), max(n_rows, int(proven[starts[:-1]].max()))
    reached = own > 0
    pure = None if model.classes is None else int((counts.max(axis=1) == own)[reached].sum())
    small = int((known[reached] < least).sum())
    return Leaves(int(reached.sum()), int(known[reached].min()), small, pure, n_rows)


def n_parameters(model: FinishedModel) -> int:
    """Return how many numbers training has chosen: two for each split, one for each leaf and output, one for each tree.

    Of K classes a leaf counts K - 1, as SACRO-ML does; of a regression as many as its outputs.
    """
    trees = model.trees
    n_leaves = sum(list(tree["left_children"]).count(-1) for tree in trees)
    n_splits = sum(len(tree["left_children"]) for tree in trees) - n_leaves
    of_leaf = leaf_size(trees[0]) if model.classes is None else len(model.classes) - 1
    return 2 * n_splits + of_leaf * n_leaves + len(trees)


def enough_child_weight(n_rounds: int) -> float:
    """Return the ``min_child_weight`` that trees deeper than ``_SAFE_DEPTH`` have to exceed in so many rounds."""
    return next((weight for most, weight in _ENOUGH_CHILD_WEIGHT if n_rounds <= most), _MOST_CHILD_WEIGHT)


# -- how it is judged -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule, judged.

    Attributes:
        rule: key of ``ReleaseRules``.
        title, words: what is looked at, and what it means, for a stranger.
        measured, limit: in words; the limit follows from the rules alone.
        remedy: what would mend it.
    """

    rule: str
    title: str
    measured: str
    limit: str
    holds: bool
    words: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Trained:
    """How a model was trained, as far as rules ask. Attributes: weighs_rows: rows have weights of their own."""

    n_rounds: int
    params: Mapping[str, Any]
    covers_are_of_rows: bool
    weighs_rows: bool

    @classmethod
    def of(cls, record: RunRecord, model: FinishedModel) -> Trained:
        """Return what a run's record says."""
        facts = training_facts(record)
        return cls(model.n_rounds, record.params, is_horizontal(record.profile), bool(facts and facts.weight))

    def hessian_bound(self) -> float | None:
        """Return the largest hessian of a row, where covers are sums of such; None else."""
        if not self.covers_are_of_rows or self.weighs_rows:
            return None
        try:
            return objective_facts(dict(self.params)).hessian_bound
        except (ConfigurationError, KeyError, ValueError, TypeError):
            return None

    def number(self, name: str, default: float) -> float:
        """Return a parameter of XGBoost's."""
        return float(self.params.get(name, default))


def training_facts(record: RunRecord) -> DataFacts | None:
    """Return what a run says of its training rows at this site."""
    return next((one for one in record.data if one.use == TRAINING), None)


def judge(model: FinishedModel, table: Table, trained: Trained, rules: ReleaseRules) -> tuple[Finding, ...]:
    """Judge a model by its structure and the rows that it was trained on here.

    Raises:
        ConfigurationError: there are no rows.
    """
    table = _labelled(model, table)
    groups = group_rows(model, table, rules.min_group_rows)
    leaves = leaves_reached(model, table, rules.min_leaf_rows, trained.hessian_bound())
    n_numbers = n_parameters(model)
    free = leaves.n_rows - n_numbers
    return (
        *_of_groups(groups, table.n_rows, rules),
        Finding(
            "min_leaf_rows",
            "Rows behind a leaf",
            f"the smallest of {leaves.n_leaves:,} leaves that rows of this site reach is known to hold "
            f"{_rows(leaves.smallest)}; {leaves.n_small:,} are below the limit{_pure(leaves)}",
            f"at least {_rows(rules.min_leaf_rows)}" if rules.min_leaf_rows else _NOT_JUDGED,
            leaves.n_small == 0,
            "A leaf is an average that is published with the model: over few rows it tells of each of them.",
            "train again with a larger min_rows_per_node in the sites' policies, or a larger min_child_weight",
        ),
        Finding(
            "min_degrees_of_freedom",
            "Rows beside the numbers that training has chosen",
            f"at least {_rows(leaves.n_rows)} in the training, {n_numbers:,} numbers: {_more(free)}",
            f"at least {rules.min_degrees_of_freedom:,} more rows",
            free >= rules.min_degrees_of_freedom,
            "A model with as many free numbers as rows can hold the rows themselves.",
            "train fewer rounds, or a smaller max_depth",
        ),
        _of_settings(trained, rules),
    )


def _labelled(model: FinishedModel, table: Table) -> Table:
    """Return the rows that training used: those with a label. Raises: ConfigurationError: there are none."""
    usable = is_labelled(table.label)
    if model.classes is not None:
        usable &= np.isin(table.label, range(len(model.classes)))
    if not usable.any():
        raise ConfigurationError("there are no labelled rows to judge the model by: name those it was trained on")
    return Table(
        table.features[usable], table.feature_names, table.feature_types, table.label[usable], table.label_name
    )


def _of_groups(found: Groups, n_rows: int, rules: ReleaseRules) -> Iterator[Finding]:
    least = rules.min_group_rows
    smaller = "train fewer rounds, a smaller max_depth or with a larger min_rows_per_node; or train private trees"
    shares: Sequence[tuple[str, int | None, str, str, str, str]] = (
        (
            "max_share_in_small_groups",
            found.in_small,
            "Rows that share their prediction with few others",
            f"in groups of fewer than {least:,}",
            "Rows with the same prediction hide one another. Whoever is alone with one can be recognised by it.",
            smaller,
        ),
        (
            "max_share_in_small_cells",
            found.in_small_cells,
            "Small counts that predictions state",
            f"in groups with fewer than {least:,} stated rows of a class",
            "Probability times the size of the group says how many of its rows have a class, as a table would.",
            smaller,
        ),
        (
            "max_share_certain",
            found.certain,
            "Predictions without doubt",
            "with a probability of zero for some class",
            "A probability of zero says of everybody in the group that none has the class.",
            "train fewer rounds, or with a larger lambda or min_child_weight, or a smaller learning_rate",
        ),
        (
            "max_share_in_one_class_groups",
            found.in_one_class,
            "Groups of one class",
            f"in groups of {least:,} rows or more that all have one class",
            "Whoever knows the labels of a group, and that a person is in it, knows the class of that person.",
            "train a smaller max_depth, or leave out a column that decides the class by itself",
        ),
    )
    for rule, n, title, where, words, remedy in shares:
        if n is None:  # of a model that states no such thing
            continue
        limit = float(getattr(rules, rule))
        smallest = f"; the smallest of {found.n_groups:,} groups has {_rows(found.smallest)}"
        measured = f"{_share(n / n_rows)} of {_rows(n_rows)} {where}{smallest if rule == shares[0][0] else ''}"
        asked = f"at most {_share(limit)} {where}" if limit < 1 else _NOT_JUDGED
        yield Finding(rule, title, measured, asked, n / n_rows <= limit, words, remedy)


def _of_settings(trained: Trained, rules: ReleaseRules) -> Finding:
    depth, weight = trained.number("max_depth", _DEFAULT_DEPTH), trained.number("min_child_weight", 1)
    enough = enough_child_weight(trained.n_rounds)
    is_risky = (depth == 0 or depth > _SAFE_DEPTH) and weight <= enough
    return Finding(
        "allow_unnecessary_risk",
        "Settings that make a model easy to attack",
        f"max_depth {depth:g}, {trained.n_rounds:,} rounds, min_child_weight {weight:g}: "
        + ("among the fifth that was attacked best" if is_risky else "not among the fifth that was attacked best"),
        _NOT_JUDGED if rules.allow_unnecessary_risk else "not among these",
        rules.allow_unnecessary_risk or not is_risky,
        "In a study of many models, those with such settings gave away most often who was in the training.",
        f"train with max_depth of at most {_SAFE_DEPTH}, or with min_child_weight above {max(enough, 0):g}",
    )


def judge_privacy(spent: tuple[float, float] | None, source: str, rules: ReleaseRules) -> tuple[Finding, ...]:
    """Judge a private model by what its job has spent.

    Args:
        spent: epsilon and delta; None if neither a ledger nor the evidence says.
        source: where that stands.
    """
    measured = f"epsilon {spent[0]:.4g} at delta {spent[1]:.3g}, {source}" if spent else "nothing here accounts for it"
    return (
        Finding(
            "max_epsilon",
            "Accounted privacy",
            measured,
            f"epsilon at most {rules.max_epsilon:g} at delta at most {rules.max_delta:g}",
            spent is not None and spent[0] <= rules.max_epsilon and spent[1] <= rules.max_delta,
            "However the model is attacked, it says nearly the same without any one person: epsilon bounds how nearly.",
            "train again with a smaller epsilon or delta" if spent else "judge it where the site's ledgers lie",
        ),
    )


# -- one run ----------------------------------------------------------------------------------------------------------


def judge_run(
    model: FinishedModel,
    folder: Path,
    record: RunRecord,
    policy: SitePolicy,
    rules: ReleaseRules,
    spec: DataSet | None = None,
) -> tuple[Finding, ...]:
    """Judge a model of a run by the rows that it was trained on at this site, or by what its job has spent.

    Args:
        model: named as its file in the run's folder.
        policy: where the site's rows and ledgers lie.
        spec: the training rows, where they are no longer the policy's data set.

    Raises:
        VeilBoostError: model or rows cannot be read, or they are not those of the run.
    """
    if is_private(record.profile):
        if model.name != record.model:
            raise ConfigurationError(
                f"{model.name} is not the model that the private job has left, {record.model}, for which it has paid"
            )
        log = own_evidence(record, folder)
        ledgers, problems = histories(record, policy)
        if problems:
            raise ConfigurationError("; ".join(problems))
        return judge_privacy(*_spent(record, ledgers, log if isinstance(log, Log) else None, rules.max_delta), rules)
    facts = training_facts(record)
    if facts is None or not facts.label:
        raise ConfigurationError("the run has no training rows of this site with a label, by which a model is judged")
    spec = policy.data_set(facts.name) if spec is None else spec
    table = load_again(spec, facts, record)
    if table.feature_names != tuple(one.name for one in model.features):
        raise ConfigurationError(
            f"{model.name} has other columns than the run's training rows at this site, which cannot tell what it holds"
        )
    if table.n_rows != facts.rows:
        raise ConfigurationError(
            f"the model was trained on {facts.rows:,} rows of this site, and {table.n_rows:,} are there now: name the "
            "file with the rows of then (--data FILE)"
        )
    if Memory.is_there(policy) and Registry.open(policy).trained_on(table, spec, record.job_id, facts.name) is False:
        raise ConfigurationError(
            "these are as many rows as the model was trained on at this site, and not the same: name the file with the "
            "rows of then (--data FILE)"
        )
    return judge(model, table, Trained.of(record, model), rules)


def _spent(
    record: RunRecord, ledgers: Sequence[LedgerHistory], log: Log | None, delta: float
) -> tuple[tuple[float, float] | None, str]:
    """Return epsilon and delta of a private job, and where that stands: the ledger first, else the evidence.

    Where several data sets paid, the largest epsilon counts.

    Args:
        delta: at which the ledger's curve is read.
    """
    found = [job.spent.epsilon(delta) for one in ledgers for job in one.jobs if job.job_id == record.job_id]
    if found and max(found) > 0:
        return (max(found), delta), "as the site's ledger adds it up"
    if log is not None and log.spends and log.number == 1:  # a later attempt's log lacks what earlier ones spent
        return (float(log.spends[-1].epsilon), float(log.spends[-1].delta)), "as the evidence says"
    return None, ""


def _rows(n: int) -> str:
    return f"{n:,} row{'' if n == 1 else 's'}"


def _share(value: float) -> str:
    """Return a share in percent: neither is called none what is some, nor all what is not."""
    shown = round(100 * value, 3)
    return f"{min(max(shown, 0.001), 99.999) if 0 < value < 1 else shown:g} %"


def _more(free: int) -> str:
    return f"{_rows(free)} more" if free >= 0 else f"{_rows(-free)} too few"


def _pure(leaves: Leaves) -> str:
    if leaves.n_one_class is None:
        return ""
    return f"; in {leaves.n_one_class:,} all rows of this site have one class"
