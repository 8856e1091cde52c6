"""How fast this machine is at what a training does: measured in a few seconds, on synthetic numbers.

All rates are CPU seconds of one thread (the wall clock of a busy machine says little), the median of three repeats.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.fixed_point import Grid
from he_processors.key_agreement import KEY_SIZE_BYTES
from he_processors.masks import MessageLabel, PairwiseMasks
from he_processors.randomness import OS_RANDOMNESS
from he_processors.sum_tags import SumTags
from nvflare_plugins.cli.plan.messages import Workload
from nvflare_plugins.wire.aggregation import add_words
from nvflare_plugins.wire.profiles import BfvSums, CkksSums, MaskedSums, PlainSums, SumProcessor

_N_VALUES = 1 << 15
_MOST_FEATURES = 100
_MOST_CELLS = 3_000_000
_MOST_SUMMANDS = 3
_REPEATS = 3
_ROUNDS = 3

Add = Callable[[list[bytes]], bytes]


@dataclass(frozen=True, slots=True)
class ProtectionRate:
    """Seconds per value: at a site (encode, protect, reveal, decode), and at the server per contribution added."""

    site_s: float
    server_s: float


@dataclass(frozen=True, slots=True)
class TreeRate:
    """Seconds of XGBoost for one tree at one site: a fixed part and a part per row."""

    fixed_s: float
    per_row_s: float

    def seconds(self, rows: int) -> float:
        """Return the time of one tree on ``rows`` rows."""
        return self.fixed_s + self.per_row_s * rows


def measure_trees(workload: Workload) -> TreeRate:
    """Train a few trees on two synthetic tables of this shape and fit a line through their times.

    Capacity: at most 100 features and 3 million cells are really trained on; the time is taken as proportional to
        features and, beyond its fixed part, to rows.
    """
    features = min(workload.features, _MOST_FEATURES)
    scale = workload.features / features
    rows = min(workload.rows_per_site, _MOST_CELLS // features)
    small = max(rows // 4, 1)
    late, early = (_seconds_per_tree(workload, n, features) for n in (rows, small))
    per_row = max(late - early, 0.0) / max(rows - small, 1)
    return TreeRate(max(late - per_row * rows, 0.0) * scale, per_row * scale)


def measure_protection(profile: str, n_sites: int) -> ProtectionRate:
    """Protect, add and reveal 32,768 values under ``profile`` as ``n_sites`` sites would."""
    processor, add = _processor(profile, n_sites)
    tags = SumTags(b"plan", 0, *_secrets(n_sites)) if profile != "plain" else None
    n_added = min(n_sites, _MOST_SUMMANDS)
    grid = Grid.for_sum(10, n_sites, processor.capacity_bits)
    values = np.random.default_rng(0).normal(size=_N_VALUES)
    at_site, at_server = [], []
    for counter in range(_REPEATS):
        label = MessageLabel(counter, "HISTOGRAM", "plan", _N_VALUES)
        protected, first = _timed(partial(_protect, processor, tags, grid, values, label))
        total, added = _timed(partial(add, [protected] * n_added))
        _, last = _timed(partial(_reveal, processor, tags, grid, total, label))
        at_site.append(first + last)
        at_server.append(added / n_added)
    return ProtectionRate(statistics.median(at_site) / _N_VALUES, statistics.median(at_server) / _N_VALUES)


def _protect(
    processor: SumProcessor, tags: SumTags | None, grid: Grid, values: NDArray[np.float64], label: MessageLabel
) -> bytes:
    integers = grid.encode(values)
    _tag(tags, integers, replace(label, counter=2 * label.counter))
    return processor.protect(integers, label)


def _reveal(
    processor: SumProcessor, tags: SumTags | None, grid: Grid, total: bytes, label: MessageLabel
) -> NDArray[np.float64]:
    integers = processor.reveal(total, label)
    _tag(tags, integers, replace(label, counter=2 * label.counter + 1))  # to check a tag takes as long as to make it
    return grid.decode(integers)


def _tag(tags: SumTags | None, integers: NDArray[np.int64], label: MessageLabel) -> None:
    if tags is not None:
        tags.protect(integers, np.zeros(0, dtype=np.uint64), label)


def _secrets(n_sites: int) -> tuple[dict[int, bytes], bytes]:
    pair_secrets = {rank: OS_RANDOMNESS.bytes(KEY_SIZE_BYTES) for rank in range(1, n_sites)}
    return pair_secrets, OS_RANDOMNESS.bytes(KEY_SIZE_BYTES)


def process_memory_bytes() -> int:
    """Return the memory of this process so far: Python with XGBoost and, where used, the lattice library."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _processor(profile: str, n_sites: int) -> tuple[SumProcessor, Add]:
    """Return a processor as a site has it, with random keys of its own, and the server's addition."""
    if profile == "plain":
        return PlainSums(), _add_words
    masks = PairwiseMasks(b"plan", 0, *_secrets(n_sites))
    if profile == "masks":
        return MaskedSums(masks), _add_words
    # Imported here: the lattice library takes long to load and most plans do without it.
    from he_processors import bfv, ckks

    if profile == "bfv":
        bfv_key = bfv.BfvProcessor.from_secret(bfv.BfvProcessor.generate(n_sites))
        return BfvSums(bfv_key, masks), partial(bfv.add_ciphertexts, bfv_key.public_parameters())
    ckks_key = ckks.CkksProcessor.from_secret(ckks.CkksProcessor.generate(n_sites))
    return CkksSums(ckks_key, masks), partial(ckks.add_ciphertexts, ckks_key.public_parameters())


def _add_words(payloads: list[bytes]) -> bytes:
    return add_words(payloads, len(payloads[0]) // 8)


def _seconds_per_tree(workload: Workload, rows: int, features: int) -> float:
    rng = np.random.default_rng(0)
    table: NDArray[np.float32] = rng.normal(size=(rows, features)).astype(np.float32)
    # A noisy label keeps the trees full, as the plan assumes.
    label = (table[:, 0] + rng.normal(size=rows) > 0).astype(np.float32)
    parameters: dict[str, Any] = {
        "objective": "binary:logistic",
        "max_depth": workload.depth,
        "max_bin": workload.bins,
        "nthread": 1,
        "min_child_weight": 0,
        "base_score": 0.5,
    }
    if workload.max_leaves:
        parameters |= {"grow_policy": "lossguide", "max_leaves": workload.max_leaves}
    booster = xgb.Booster(parameters, [matrix := xgb.QuantileDMatrix(table, label, max_bin=workload.bins)])
    booster.update(matrix, 0)  # the first round also sets up
    times = [_timed(partial(booster.update, matrix, i))[1] for i in range(1, _ROUNDS + 1)]
    return statistics.median(times)


def _timed(action: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    result = action()
    return result, time.process_time() - started
