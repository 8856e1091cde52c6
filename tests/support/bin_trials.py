"""Trainings under which the attack on bins is tried: data sets, presets, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from nvflare_plugins.data.declaration import VerticalRules
from nvflare_plugins.kinds.vertical.gradient_scale import pair_format
from nvflare_plugins.kinds.vertical.guards import MAX_SHARE, Exposure, Guard
from nvflare_plugins.site.memory.released import ReleasedSums
from nvflare_plugins.site.memory.store import Memory
from tests.support.bin_attack import Recovery, attack
from tests.support.bin_tap import Tap
from tests.support.clear_maker import ClearHistogramMaker
from tests.support.vertical_federation import Joined, federate

ENDLESS = 10**9
PRESETS = {
    "exact": None,
    "floor of 20 rows only": (VerticalRules(max_sums_per_row=ENDLESS, max_split_bits_per_row=ENDLESS), ENDLESS),
    "guarded, 300 sums a row": (VerticalRules(max_sums_per_row=300, max_split_bits_per_row=ENDLESS), MAX_SHARE),
    "guarded": (VerticalRules(), MAX_SHARE),
}
"""Name -> the rules of the passive party and its cap on sums per row; None: everything leaves."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One training and the attack on it."""

    recovery: Recovery
    exposure: Exposure
    tap: Tap
    codes: np.ndarray


def breast(path: Path) -> Joined:
    frame = pd.read_parquet(path).drop(columns="split").astype(np.float32)
    label = frame.pop("label").to_numpy()
    return Joined(frame.to_numpy(), label, (15, 15))


def credit2(path: Path, n_rows: int) -> Joined:
    frame = pd.read_parquet(path).astype(np.float32).sample(n_rows, random_state=0)
    label = frame.pop("label").to_numpy()
    return Joined(frame.to_numpy(), label, (11, 12))


def try_preset(joined: Joined, preset: str, folder: Path, n_trees: int, depth: int, features, **params) -> Trial:
    """Train with one passive party, and attack a sample of its features."""
    n_rows = joined.features.shape[0]
    rules, max_share = PRESETS[preset] or (VerticalRules(), MAX_SHARE)
    is_exact = PRESETS[preset] is None
    guard = Guard(
        rules,
        ReleasedSums(Memory(folder / preset.replace(" ", "_"), "site"), "data"),
        [str(i) for i in range(n_rows)],
        enforce=not is_exact,
        max_share=max_share,
    )
    tap = Tap(pair_format(n_rows), n_rows)
    settings = {"objective": "binary:logistic", "max_depth": depth, "max_bin": 32, **params}
    outcome = federate(
        joined,
        settings,
        n_trees,
        scheme=lambda n: (tap, ClearHistogramMaker),
        guards=[guard],
        listen=tap.listen,
        guarded=not is_exact,
    )
    tap.finish()
    codes = outcome.passives[0]._codes
    return Trial(attack(tap.trees, tap.layout, codes, features), guard.exposure(), tap, codes)
