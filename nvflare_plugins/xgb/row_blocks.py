"""Hands XGBoost the rows of a table some at a time, as often as it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xgboost import DataIter


def label_fields(label: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return labels as XGBoost's matrices take them. Shapes: label: [n_rows], or [n_rows, 2] of times, their bounds."""
    if label.ndim == 1:
        return {"label": label}
    return {"label_lower_bound": label[:, 0], "label_upper_bound": label[:, 1]}


class RowBlocks(DataIter):
    """What XGBoost builds a matrix from whose values are never all held.

    Args:
        blocks: gives all rows in their order. Shapes: float32[some rows, n_features].
        label, weight: of all rows. Shapes: float32[n_rows], label also [n_rows, 2] of times.
        layout: names and types of the features, as XGBoost's matrices take them.
        cache_prefix: where XGBoost puts its files, if it is to make some.
    """

    def __init__(
        self,
        blocks: Callable[[], Iterator[NDArray[np.float32]]],
        label: NDArray[np.float32],
        weight: NDArray[np.float32] | None,
        layout: Mapping[str, Sequence[str]],
        cache_prefix: str | None = None,
    ) -> None:
        self._blocks, self._label, self._weight, self._layout = blocks, label, weight, layout
        self._first = 0
        self._rest: Iterator[NDArray[np.float32]] = iter(())
        super().__init__(cache_prefix)

    def next(self, input_data: Callable[..., None]) -> bool:
        """Hand over the next block. Returns: whether there was one."""
        block = next(self._rest, None)
        if block is None:
            return False
        rows = slice(self._first, self._first + block.shape[0])
        self._first = rows.stop
        facts: dict[str, Any] = dict(self._layout)
        if self._weight is not None:
            facts["weight"] = self._weight[rows]
        input_data(data=block, **label_fields(self._label[rows]), **facts)
        return True

    def reset(self) -> None:
        """Begin again."""
        self._rest, self._first = (block for block in self._blocks() if len(block)), 0
