"""Prediction: the passive party routes rows by its true values, which no epsilon covers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dp_components.errors import PrivacyRefusal
from dp_components.split_candidates.candidates import Candidates


class ThresholdParty:
    """A passive party at prediction time. It answers for new rows, and refuses the rows it was trained on.

    Privacy: an answer is an exact bit of a true value. For a training row it would undo the randomised buckets; for a
        new row it is a disclosure that the caller must have agreed to apart, outside any epsilon.
    """

    def __init__(self, edges: Candidates, training_ids: Iterable[str]) -> None:
        """Remember the edges and the identifiers of the rows whose buckets were sent.

        Raises:
            ValueError: there are no training rows: then nothing could be refused.
        """
        self._edges = edges
        self._training_ids = frozenset(training_ids)
        if not self._training_ids:
            raise ValueError("the identifiers of the training rows are needed to refuse them")

    def threshold(self, feature: int, bucket: int) -> float:
        """Return t of the rule x <= t that sends buckets up to ``bucket`` to the left.

        Privacy: public, or paid with the edges.

        Raises:
            ValueError: there is no such feature, or no edge after such a bucket.
        """
        if not 0 <= feature < len(self._edges.of_feature) or not 0 <= bucket < self._edges.counts[feature]:
            raise ValueError("no edge of this party")
        return float(self._edges.of_feature[feature][bucket])

    def goes_left(
        self, record_ids: Sequence[str], column: NDArray[np.float32], feature: int, bucket: int
    ) -> NDArray[np.bool_]:
        """Say which rows go left at a split. A missing value goes right.

        Shapes: column: float32[n_rows], true values of the feature; result: bool[n_rows].

        Raises:
            PrivacyRefusal: one of the rows was trained on.
            ValueError: not one identifier per row, or no such split.
        """
        if column.shape != (len(record_ids),):
            raise ValueError("needs one identifier per row")
        n_refused = sum(record in self._training_ids for record in record_ids)
        if n_refused:
            raise PrivacyRefusal(
                f"{n_refused} of {len(record_ids)} rows were trained on: true thresholds would reveal exact bits of "
                "values that were sent under local privacy. Nothing was answered."
            )
        return column <= np.float32(self.threshold(feature, bucket))
