"""What a passive party does against what exact sums per bin reveal, and what its report says of that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_components.split_candidates.candidates import Columns
from he_processors.errors import ConfigurationError, ProtocolError
from he_processors.histogram.planner import BinCodes
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.data.declaration import VerticalRules
from nvflare_plugins.kinds.vertical.party_data import CutPoints
from nvflare_plugins.pages.run_record import PointCurve, ReportSection
from nvflare_plugins.site.memory.released import Released, ReleasedSums, differences, fingerprint_of

# What a passive party does against what exact sums per bin reveal: the preset ``guarded``.
#
# For one bin of one feature, all sums over all nodes and trees are linear equations in a 0/1 vector over rows, and the
# active party knows their coefficients, because it knows every gradient and every node's rows. With as many independent
# equations as rows it solves them (``bin_attack.py`` does). The guards keep equations few and never about few rows:
#
# * a floor: no sums of a node with fewer rows, and none of its sibling, which would give them by subtraction; * the
# floor on differences: no sums over a set of rows that differs from a released one, or from the complement of one, by
# so few rows, whichever tree or job released it; * caps: on bins, on the sums that any row takes part in, on sums per
# row, and on the splits that divide a row, over all jobs on the data set; * bins with fewer rows than the floor are
# merged with a neighbour before training.
#
# The caps are what slows the attack down, floors alone hardly do. On 20,000 rows of credit2 (100 trees of depth 3) it
# recovers 84 % of the bins from an exact training, and 26 % from a guarded one under the default rules, where guessing
# gets 15 % and the splits of the model alone 18 %; with a cap of 300 sums for a row it is 68 %. On 2,000 rows the floor
# changes nothing: 100 % (``tests/bench/bin_attack_rates.py``).
#
# What a split of this party reveals by itself, one ordered bit per row of its node, is part of the model, and counted.
# A node that holds a row without a bit left gets no sums, so that this party wins no split there. Bits are counted over
# all features together: no feature can have shown more.
#
# A node whose sums are withheld stays without, and so does all below it: this party's features do not compete there,
# and training goes on. The model then differs from the centralized one.
#
# Security: **heuristics, not a guarantee.** They raise the price of the attack that is known; they do not bound what is
# learnt as noise under differential privacy would. Differences are compared in pairs: a combination of three or more
# sets is not checked, only their number is capped. Sums are exact to forty bits and more, so that few of them already
# hold the bins of a hundred rows for somebody who solves subset sums by lattice reduction, which was not tried. The
# party cannot see gradients: against an active party that sends zeros for all rows but one, no floor helps.


SUMS_PER_SET = 2  # of gradients and of hessians; twice as many where the reader sees two digits of each
MAX_SHARE = 0.02
"""Most sums per row, on average over the rows of a node: equations per unknown.

It matters in small tables: with 2,000 rows the attack recovers 29 % of the bins at 0.02, and 47 % at 0.07, which is
five trees without guards. Sums over fewer than 2 / MAX_SHARE = 100 rows never leave, whatever the floor.
"""
_SAFE_FACTOR = 2.0  # a difference of the floor's size is estimated as twice that with a chance below 1e-6


@dataclass(frozen=True, slots=True)
class Exposure:
    """How many sums this party has released, over all jobs: numbers for its own report.

    Units: independent sums of one feature (every feature is counted as if it took part in all); a node's gradients and
        its hessians are two, or four under profiles that show the sums of two digits of each (``sums_per_set``), and a
        sibling that follows by subtraction is none. ``per_row`` counts the sums that a row
        is in; ``share`` divides every sum among its rows: its mean over the rows is equations per unknown.

    Attributes:
        n_sums: of this job alone.
        nodes_released, nodes_withheld: of this job, siblings included.
        split_bits_max, split_bits_mean: splits of this party that divided a row, over all jobs: one ordered bit each.
    """

    n_sums: int
    per_row_max: int
    per_row_mean: float
    per_row_cap: int | None
    share_max: float
    share_mean: float
    share_cap: float | None
    nodes_released: int
    nodes_withheld: int
    split_bits_max: int
    split_bits_mean: float
    split_bits_cap: int | None


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """Sums that become known together: those of a root, or of two siblings, of which one is sent.

    Shapes: sets: int64[n_set_rows] each, sent: one of them; places of rows in the ledger.
    """

    sets: tuple[NDArray[np.int64], ...]
    sent: NDArray[np.int64]
    fingerprints: tuple[NDArray[np.int32], ...]
    parent_size: int
    n_sums: int

    def added_share(self, rows: NDArray[np.int64]) -> float:
        """Return the sums per row that a set adds: where a node's sums were known, its children's take their place."""
        before = self.n_sums / self.parent_size if self.parent_size else 0.0
        return self.n_sums / max(rows.size, 1) - before


@dataclass(frozen=True, slots=True, repr=False)
class SplitBits:
    """On which side of one of this party's splits rows lie: one bit for each. Shapes: rows: int[n]; goes_left: bool[n].

    Attributes:
        split: names the split: feature, threshold or categories, side of missing values.
        data_set: number of the set that the rows are of; 0 is the training set.
    """

    split: bytes
    rows: NDArray[np.integer[Any]]
    goes_left: NDArray[np.bool_]
    data_set: int = 0


class Guard:
    """Decides for one job which nodes' sums may leave, and charges them durably before they do."""

    def __init__(
        self,
        rules: VerticalRules,
        ledger: ReleasedSums,
        row_ids: Sequence[str],
        *,
        row_fraction: float = 1.0,
        enforce: bool = True,
        max_share: float = MAX_SHARE,
        sums_per_set: int = SUMS_PER_SET,
    ):
        """Open the guard of one job.

        Args:
            rules: the site's own policy (``SitePolicy.vertical``).
            ledger: of the data set by its name in the policy, whatever rows its file holds.
            row_ids: canonical ids of the training rows in the agreed order; their positions as text if there are none.
            row_fraction: the job's ``subsample``.
            enforce: False in the preset ``exact``: everything is released, and still counted for later jobs.
            max_share: sums per row, on average over a node's rows, for experiments.
            sums_per_set: numbers that the active party sees for each bin of a node.

        Raises:
            ConfigurationError: the ledger is damaged.
            ValueError: an id comes twice.
        """
        self._rules = rules
        self._ledger = ledger
        self._enforce = enforce
        self._max_share = max_share
        self._sums_per_set = sums_per_set
        # Where rows are sampled, only a fraction of a node's rows has gradients.
        self._floor = math.ceil(rules.min_rows_per_node / row_fraction)
        self._keys = ledger.row_keys(row_ids)
        self._everyone = fingerprint_of(self._keys)
        with ledger.charging() as released:
            self._places = released.enter(self._keys)
            self._told = set(released.told.tolist())
        self._sets = {0: (self._keys, self._places)}  # whose split bits are counted: keys and places of their rows
        self._this_tree: set[bytes] = set()
        self._n_sums = self._n_released = self._n_withheld = 0

    @property
    def n_rows(self) -> int:
        """Return the rows of the job."""
        return self._keys.size

    def check_bins(self, max_bin: int) -> None:
        """Refuse a job with more bins than the policy allows. Raises: PolicyRefusal."""
        if self._enforce and max_bin > self._rules.max_bins:
            raise PolicyRefusal(
                f"the job asks for {max_bin} bins; this site allows {self._rules.max_bins} in guarded vertical jobs. "
                "Policy key: vertical.max_bins. Remedy: lower max_bin of the job."
            )

    def merge_rare_bins(self, cuts: CutPoints, columns: Columns) -> CutPoints:
        """Merge bins with fewer rows than the floor with a neighbour. Shapes: columns: float32[n_features, n_rows]."""
        return merge_rare_bins(cuts, cuts.codes(columns), self._floor) if self._enforce else cuts

    def codes(self, cuts: CutPoints, columns: Columns) -> BinCodes:
        """Return the bins of the training rows; fewer missing values than the floor count as values of the last bin.

        A missing value then goes right at every split, as it does in prediction where training saw none missing; in a
        categorical feature it goes with the last bin, whose side the party then keeps as that of missing values.

        Shapes: columns: float32[n_features, n_rows]; result: uint8 or uint16[n_features, n_rows].
        """
        codes = cuts.codes(columns)
        if self._enforce:
            for line, n_bins in zip(codes, cuts.layout.n_bins, strict=True):
                is_missing = line == n_bins
                if np.count_nonzero(is_missing) < self._floor:
                    line[is_missing] = n_bins - 1
        return codes

    def admit_root(self) -> bool:
        """Begin a tree: tell whether the sums of all rows may leave. If not, none of this job's later ones may."""
        self._this_tree = set()
        with self._charging() as released:
            return self._admit(released, Step((self._places,), self._places, (self._everyone,), 0, self._sums_per_set))

    def admit(self, children: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]]) -> list[bool]:
        """Tell for each divided node whether the sums of both its children may leave: one is sent, one follows.

        The sums of the divided nodes themselves must have been admitted.

        Args:
            children: the rows of the child to be sent, and those of its sibling.
        """
        with self._charging() as released:
            answers = []
            for pair in children:
                sent, follows = (self._places[rows] for rows in pair)
                fingerprints = tuple(fingerprint_of(self._keys[rows]) for rows in pair)
                step = Step((sent, follows), sent, fingerprints, sent.size + follows.size, self._sums_per_set)
                answers.append(self._admit(released, step))
        return answers

    def count_answers_about(self, data_set: int, row_ids: Sequence[str]) -> None:
        """Count split bits of a further set, whose rows are of the same table as the training rows (or are these).

        Args:
            data_set: its number among the job's sets.
            row_ids: as those of the training rows.
        """
        keys = self._ledger.row_keys(row_ids)
        with self._ledger.charging() as released:
            self._sets[data_set] = (keys, released.enter(keys))

    def is_new(self, answer: SplitBits) -> bool:
        """Tell whether an answer about rows on their way down a finished tree would show what was not shown before.

        In an honest training none does: all rows of a node were told apart when it was split, in this attempt or in the
        job whose model is continued. It is new of rows that did not reach the node, or have other values than then.
        Answers about sets that this guard does not count are others' to count.
        """
        return answer.data_set in self._sets and self._name_of(answer) not in self._told

    def charge_bits(self, answers: Sequence[SplitBits]) -> None:
        """Charge what this party is about to tell of which rows go left: one bit for every row.

        Args:
            answers: of splits just won, the rows of their nodes, whose sums must have been admitted; or new answers
                about rows on their way down finished trees.

        Raises:
            PolicyRefusal: a row has no bit left. The sums of a split's node would have been withheld, had it been so
                when they were due: another job on the data set runs at the same time.
        """
        names, most = [self._name_of(one) for one in answers], 0
        with self._charging() as released:
            for one in answers:
                places = self._sets[one.data_set][1][one.rows]
                released.split_bits[places] += 1
                most = max(most, int(released.split_bits[places].max(initial=0)))
            if self._enforce and most > self._rules.max_split_bits_per_row:
                raise PolicyRefusal(
                    "this site shows no more often on which side of its splits a row lies. Policy key: "
                    "vertical.max_split_bits_per_row. Remedy: run one job at a time, with fewer or "
                    "shallower trees (num_rounds, max_depth)."
                )
            released.remember([name for name in dict.fromkeys(names) if name not in self._told])
        self._told.update(names)

    def _name_of(self, one: SplitBits) -> int:
        keys = self._sets[one.data_set][0][one.rows]
        return self._ledger.answer_name(one.split, keys[one.goes_left], keys[~one.goes_left])

    def exposure(self) -> Exposure:
        """Return the numbers for the report."""
        released = self._still_of_this_job(self._ledger.read())
        sums, share, bits = (of[self._places] for of in (released.sums, released.share, released.split_bits))
        return Exposure(
            self._n_sums,
            int(sums.max(initial=0)),
            float(sums.mean()),
            self._rules.max_sums_per_row if self._enforce else None,
            float(share.max(initial=0)),
            float(share.mean()),
            self._max_share if self._enforce else None,
            self._n_released,
            self._n_withheld,
            int(bits.max(initial=0)),
            float(bits.mean()),
            self._rules.max_split_bits_per_row if self._enforce else None,
        )

    @contextmanager
    def _charging(self) -> Iterator[Released]:
        with self._ledger.charging() as released:
            yield self._still_of_this_job(released)

    def _still_of_this_job(self, released: Released) -> Released:
        if not all(released.holds(places, keys) for keys, places in self._sets.values()):
            raise ConfigurationError("guards of vertical jobs: the ledger of released sums was replaced during the job")
        return released

    def _admit(self, released: Released, step: Step) -> bool:
        if self._enforce and not self._may_leave(released, step):
            self._n_withheld += len(step.sets)
            return False
        released.sums[step.sent] += step.n_sums
        for rows in step.sets:
            released.share[rows] += np.float32(step.added_share(rows))
        for rows, fingerprint in zip(step.sets, step.fingerprints, strict=True):
            released.add_set(rows.size, fingerprint)
            self._this_tree.add(fingerprint.tobytes())
        self._n_sums += step.n_sums
        self._n_released += len(step.sets)
        return True

    def _may_leave(self, released: Released, step: Step) -> bool:
        if any(rows.size < self._floor for rows in step.sets):
            return False
        if released.sums[step.sent].max() + step.n_sums > self._rules.max_sums_per_row:
            return False
        if any(released.split_bits[rows].max() >= self._rules.max_split_bits_per_row for rows in step.sets):
            return False
        if any(released.share[rows].mean() + step.added_share(rows) > self._max_share for rows in step.sets):
            return False
        return not any(
            self._is_near(rows.size, fingerprint, released)
            for rows, fingerprint in zip(step.sets, step.fingerprints, strict=True)
        )

    def _is_near(self, size: int, fingerprint: NDArray[np.int32], released: Released) -> bool:
        """Tell whether a set differs from a released one, or from the complement of one, by fewer rows than the floor.

        A set that was released before makes no new difference. Sets of this tree need no comparison: they are nested
        or disjoint, and every part of them is above the floor.
        """
        if released.has_set(size, fingerprint):
            return False
        for sizes, fingerprints in (
            (released.sizes, released.fingerprints),
            (self.n_rows - released.sizes, self._everyone - released.fingerprints),
        ):
            close = np.flatnonzero(np.abs(sizes - size) < self._floor)  # the difference is at least that of the sizes
            estimates = differences(fingerprint, fingerprints[close])
            suspects = close[(estimates > 0) & (estimates < _SAFE_FACTOR * self._floor)]
            if any(released.fingerprints[i].tobytes() not in self._this_tree for i in suspects):
                return True
        return False


def merge_rare_bins(cuts: CutPoints, codes: BinCodes, floor: int) -> CutPoints:
    """Merge each bin that holds fewer training rows than the floor with the next one, the last with the one before.

    Categories have no order: those that are rare are put together into one bin, with the least frequent of the others
    if they are still too few. A split then sends them the same way.

    Shapes: codes: uint8 or uint16[n_features, n_rows], of the training rows.
    """
    upper, bin_of_category = [], {}
    for feature, (line, bounds) in enumerate(zip(codes, cuts.upper, strict=True)):
        if feature in cuts.bin_of_category:
            upper.append(bounds)
            bin_of_category[feature] = _rare_together(np.bincount(line, minlength=bounds.size + 1)[:-1], floor)
            continue
        counts = np.bincount(line, minlength=bounds.size + 1)[: bounds.size]
        kept, n_rows = [], 0
        for bound, count in enumerate(counts):
            n_rows += int(count)
            if n_rows >= floor:
                kept.append(bound)
                n_rows = 0
        # What is left over joins the last bin, whose upper bound stays that of the feature.
        kept = [*kept[:-1], bounds.size - 1] if kept else [bounds.size - 1]
        upper.append(bounds[kept])
    return CutPoints(tuple(upper), cuts.lowest, bin_of_category)


def _rare_together(counts: NDArray[np.int64], floor: int) -> NDArray[np.int64]:
    """Return the bin of each category. Shapes: counts: int64[n_categories], training rows; result: the same."""
    is_rare = counts < floor
    while is_rare.any() and not is_rare.all() and counts[is_rare].sum() < floor:
        is_rare[np.flatnonzero(~is_rare)[np.argmin(counts[~is_rare])]] = True
    bins = np.cumsum(~is_rare) - 1
    bins[is_rare] = np.count_nonzero(~is_rare)
    result: NDArray[np.int64] = bins
    return result


# What a passive party's report says about its bins: sums and split bits per row, and what an attack makes of sums.


_Points = tuple[tuple[float, float], ...]


def _points(sums: Sequence[float], recovered: Sequence[float]) -> _Points:
    return tuple(zip(sums, recovered, strict=True))


MEASURED: dict[str, _Points] = {
    "breast, 569 rows, depth 5": _points(
        (3, 6, 9, 16, 25, 40, 70, 122, 169), (0.10, 0.16, 0.20, 0.24, 0.30, 0.42, 0.73, 0.93, 0.95)
    ),
    "credit2, 2,000 rows, depth 5": _points(
        (4, 7, 11, 18, 28, 40, 65, 118, 349), (0.20, 0.25, 0.34, 0.47, 0.61, 0.78, 0.93, 1.00, 1.00)
    ),
    "credit2, 20,000 rows, depth 3": _points(
        (2, 5, 8, 14, 21, 32, 53, 93, 265), (0.17, 0.18, 0.20, 0.22, 0.27, 0.32, 0.41, 0.52, 0.84)
    ),
}
"""Table -> (sums that a row is in, on average; part of all bins that the attack recovers), after more and more trees.

Measured by ``tests/bench/bin_attack_rates.py`` with 32 bins and the preset exact, on public tables.
"""


def bins_section(found: Exposure, preset: str, sums_per_set: int = SUMS_PER_SET) -> ReportSection:
    """Describe what this party has released, and draw what that was worth elsewhere.

    Privacy: for the party's own report: counts alone, no value, bin or row.
    """
    so_far = found.per_row_mean
    here: _Points = ((so_far, 0.0), (so_far, 1.0))
    digits = (
        " This job's profile shows the active party two digits of every sum: a bin of a node counts as "
        f"{sums_per_set} sums where others show {SUMS_PER_SET}."
        if sums_per_set > SUMS_PER_SET
        else ""
    )
    return ReportSection(
        title="What bins reveal: sums per row and feature",
        paragraphs=(
            f"Preset {preset}. Sums of one feature that this party has released, over all jobs on this data set. Each "
            f"is a linear equation in the bins of the rows, and the active party knows its coefficients.{digits}",
            "A split of this party shows the active party one ordered bit of each row of its node: below the threshold "
            "or not. These bits are part of the model, and are counted over all features together.",
            "The curves show how many bins of other tables an active party recovered from as many sums, by guessing "
            "and by the splits of the model included. They are no bound: the guards are heuristics, and a better "
            "attack needs fewer sums. The upright line is this data set.",
        ),
        columns=("", "so far", "cap"),
        rows=(
            ("sums that a row is in, most", str(found.per_row_max), _cap(found.per_row_cap)),
            ("sums that a row is in, mean", f"{found.per_row_mean:.1f}", ""),
            ("equations per row, most", f"{found.share_max:.3f}", ""),
            ("equations per row, mean over the rows of a node", f"{found.share_mean:.3f}", _cap(found.share_cap)),
            ("splits that divided a row, most", str(found.split_bits_max), _cap(found.split_bits_cap)),
            ("splits that divided a row, mean", f"{found.split_bits_mean:.1f}", ""),
            ("sums of this job", str(found.n_sums), ""),
            ("nodes released by this job", str(found.nodes_released), ""),
            ("nodes withheld by this job", str(found.nodes_withheld), ""),
        ),
        curves=(*(PointCurve(name, points) for name, points in MEASURED.items()), PointCurve("this data set", here)),
        x_label="sums that a row is in, mean",
        y_label="bins recovered",
    )


def _cap(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


# How far a tree of a job may grow: what a passive party holds the active party to, node by node.
#
# A passive party is told of every division of a node whose sums it gave, so that it knows each such node's depth. What
# grows below nodes whose sums it kept, it neither hears of nor pays for.


ROOT = 0


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """What the parameters of the job allow.

    Attributes:
        max_depth, max_leaves: as XGBoost's; 0 for no limit.
    """

    max_depth: int
    max_leaves: int

    @classmethod
    def from_effective(cls, effective: Mapping[str, str]) -> TreeLimits:
        """Read the settings that a probe Booster reported (xgb/parameters.py, ``effective``)."""
        return cls(int(effective["max_depth"]), int(effective["max_leaves"]))

    def most_splits(self, n_rows: int) -> int:
        """Return the most nodes of one tree that are split; a tree without limits has a leaf for each row at most."""
        limits = [n_rows]
        if self.max_leaves > 0:
            limits.append(self.max_leaves - 1)
        if 0 < self.max_depth < n_rows.bit_length():
            limits.append((1 << self.max_depth) - 1)
        return max(min(limits), 0)


NO_LIMITS = TreeLimits(0, 0)


@dataclass(slots=True)
class GrownNodes:
    """The nodes of one tree that a party knows, counted against the limits."""

    limits: TreeLimits
    most_splits: int
    _depth: dict[int, int] = field(default_factory=lambda: {ROOT: 0})
    _split: set[int] = field(default_factory=set)

    def divide(self, node: int, left: int, right: int) -> None:
        """Note a node whose children's sums are asked for. Raises: ProtocolError: the job's trees do not grow so far.

        XGBoost evaluates no children that it could not split: neither at the last depth, nor of a full tree.
        """
        depth = self._depth[node] + 1
        if 0 < self.limits.max_depth <= depth:
            raise ProtocolError("sums are asked for below the depth that the job's trees have")
        self.split(node)
        if 0 < self.limits.max_leaves <= len(self._split) + 1:
            raise ProtocolError("sums are asked for in a tree that has all its leaves")
        self._depth[left] = self._depth[right] = depth

    def split(self, node: int) -> None:
        """Note a node that is split, once. Raises: ProtocolError: the job's trees have fewer."""
        self._split.add(node)
        if len(self._split) > self.most_splits:
            raise ProtocolError("more nodes are split than the job's trees have")
