"""Looks for what is private in all that leaves a site."""

from __future__ import annotations

import functools
import random
import struct
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tests.simulation.faults import Plan
from tests.simulation.world import Outcome

NAMELESS = ("horizontal", "bagging", "vertical", "vertical_inference", "alignment")
"""Kinds whose jobs do not name the columns, so that the server has no business with their names."""


def nothing_in_clear(kind: str, plan: Plan, outcome: Outcome) -> Iterator[str]:
    """Nothing that leaves a site, messages and its report, holds what stands in its rows and nowhere else."""
    dice = random.Random(f"words {plan.seed}")
    for site in outcome.parties.sites:
        said = b"".join(sent.payload or b"" for sent in outcome.messages if sent.origin == site)
        report = outcome.reports.get(site, {})
        said += b"".join(v if isinstance(v, bytes) else str(v).encode() for v in report.values())
        workspace = outcome.parties.workspace(site)
        for what, word in _private_words(workspace, dice, kind in NAMELESS):
            if word in said:
                yield f"{site} said {what} in clear"
                break


_TELLING = 5  # bytes of a word that are not zero


@functools.lru_cache(maxsize=100)
def _columns(table: bytes) -> list[tuple[str, list[Any] | NDArray[np.float64]]]:
    """Return names and values of a Parquet file's columns; of those without numbers as a list."""
    frame = pd.read_parquet(BytesIO(table))
    return [
        (str(name), column.to_numpy(np.float64) if pd.api.types.is_numeric_dtype(column) else list(column))
        for name, column in frame.items()
    ]


def _private_words(workspace: Path, dice: random.Random, names: bool) -> Iterator[tuple[str, bytes]]:
    """Yield some of what is a site's alone: ids, values as numbers and as text, labels in their order, its folder."""
    yield "the folder in which it works", str(workspace).encode()
    for path in sorted(workspace.glob("*.parquet")):
        for name, values in _columns(path.read_bytes()):
            if names and len(name) > 4:
                yield "the name of a column", name.encode()
            if isinstance(values, list):
                yield from (("an id", str(text).encode()) for text in dice.sample(values, 12) if len(text) > 4)
                continue
            if name == "y":
                for dtype in ("<f4", "<f8", "u1", "<i4", "<i8"):
                    yield "labels in their order", values[:48].astype(dtype).tobytes()
                continue
            for place in dice.sample(range(len(values) - 1), 6):
                words = struct.pack("<d", values[place]), values[place : place + 2].astype("<f4").tobytes()
                for what, word in zip(("a value of a row", "values of two rows"), words, strict=True):
                    if 8 - word.count(0) >= _TELLING:  # round numbers may stand among zeros by chance
                        yield what, word
                text = repr(float(values[place]))
                if len(text) > 8:
                    yield "a value of a row as text", text.encode()
