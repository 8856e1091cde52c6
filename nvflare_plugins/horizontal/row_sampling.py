"""Which rows a round trains on: drawn by each site from a secret of its own, never from the job's seed.

XGBoost draws a site's rows from the job's public seed. Whoever knows the seed knows the rows, and the sum over a few
known rows is an answer about these very people. So XGBoost gets ``subsample=1`` and keeps its seed for columns and
dropped trees, and each round the site sets the weights of the rows that it has not drawn to zero. That is what
XGBoost's own sampling amounts to: it sets their gradient pairs to zero. First estimate, metrics and evaluation see the
true weights.

All trees of a round use the same rows. Under absolute and quantile error XGBoost takes weighted quantiles for the
leaves, as it does for any weighted training.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import xgboost as xgb
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from he_processors.key_agreement import derive_key
from nvflare_plugins.data_sets.identity import row_tags
from nvflare_plugins.data_sets.table import Table
from nvflare_plugins.xgb.parameters import TrainingParameters

_PURPOSE = "row sampling"


def row_fraction(parameters: TrainingParameters) -> float:
    """Return the job's ``subsample``, 1 if it has none."""
    return float(parameters.agreed.get("subsample", 1.0))  # type: ignore[arg-type]


def check_sampling(parameters: TrainingParameters) -> None:
    """Refuse what the rows of a round cannot be drawn for. Raises: ConfigurationError."""
    if row_fraction(parameters) < 1 and int(parameters.effective.get("num_parallel_tree", 1)) > 1:
        raise ConfigurationError(
            "num_parallel_tree above 1 with subsample below 1: the parallel trees of a round would all get the same "
            "rows. Leave num_parallel_tree out, or subsample."
        )


class RowDraws:
    """Draws the rows of each round.

    Security: a pseudorandom function of the site's secret, the round and the row; whoever lacks the secret cannot tell
        the draws from independent coins. A row is known by the rank of its keyed hash, so that neither the order of the
        file nor a restart changes its draws. The same secret, rows and round give the same draw: jobs that repeat each
        other draw the same rows, and their difference shows none.
    """

    def __init__(self, secret: bytes, table: Table, fraction: float, at_least_one: bool = False):
        """Draw from a secret.

        Args:
            secret: 32 bytes of this site, see ``Registry.secret``.
            table: this site's training rows.
            fraction: chance of a row, in (0, 1).
            at_least_one: where a round draws none of the rows with weight, one takes part all the same. XGBoost 3.2
                confuses the leaves of absolute and quantile error at a site without rows, and the models then differ.
        """
        self._secret = secret
        self._at_least_one_of = None
        if at_least_one:
            weight = np.ones(table.n_rows, np.float32) if table.weight is None else table.weight
            self._at_least_one_of = np.flatnonzero(weight > 0)
        # Rows that are equal share a hash, and which of them is drawn makes no difference.
        tags = row_tags(table, derive_key(secret, b"", f"{_PURPOSE}: rows"))
        self._ranks = np.argsort(np.argsort(tags, kind="stable"), kind="stable")
        self._threshold = np.uint64(min(math.ceil(fraction * 2.0**64), 2**64 - 1))

    def of_round(self, number: int) -> NDArray[np.bool_]:
        """Return which rows take part in a round. Shapes: bool[n_rows]."""
        key = derive_key(self._secret, b"", f"{_PURPOSE}: round", number)
        stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * self._ranks.size))
        numbers = np.frombuffer(stream, dtype="<u8")[self._ranks]
        drawn = numbers < self._threshold
        candidates = self._at_least_one_of
        if candidates is not None and candidates.size and not drawn[candidates].any():
            drawn[candidates[np.argmin(numbers[candidates])]] = True
        return drawn


class Draws(Protocol):
    """Which rows take part in a round."""

    def of_round(self, number: int) -> NDArray[np.bool_]:
        """Return which rows take part in a round. Shapes: bool[n_rows]."""


class SampledWeights:
    """The weights of the training matrix: the drawn rows' while XGBoost computes gradients, else the true ones."""

    def __init__(
        self,
        matrix: xgb.DMatrix,
        weight: NDArray[np.float32] | None,
        draws: Draws | None,
        estimates_base_score: bool,
    ):
        """Weigh the rows of a matrix.

        Args:
            matrix: what XGBoost trains on.
            weight: float32[n_rows], of the job's own; None for 1 each.
            draws: None, if every round trains on all rows: nothing is ever changed then.
            estimates_base_score: XGBoost's first update begins with an estimate from all rows.
        """
        self._matrix, self._weight, self._draws = matrix, weight, draws
        self._estimates = estimates_base_score
        self._number = 0

    def begin_update(self, number: int) -> None:
        """Set the weights of a round, unless XGBoost still has to estimate the base score."""
        self._number = number
        if not self._estimates:
            self._set_drawn()

    def base_score_known(self) -> None:
        """Set the weights of the first round: XGBoost has estimated the base score and waits for its tracker."""
        self._estimates = False
        self._set_drawn()

    def end_update(self) -> None:
        """Put the true weights back."""
        if self._draws is not None:
            self._matrix.set_weight(np.empty(0, np.float32) if self._weight is None else self._weight)

    def taking_part(self, number: int) -> NDArray[np.bool_]:
        """Return which rows have weight in a round. Shapes: bool[n_rows]."""
        has_weight = np.ones(self._matrix.num_row(), dtype=bool) if self._weight is None else self._weight > 0
        return has_weight if self._draws is None else has_weight & self._draws.of_round(number)

    def _set_drawn(self) -> None:
        if self._draws is not None:
            drawn = self._draws.of_round(self._number).astype(np.float32)
            self._matrix.set_weight(drawn if self._weight is None else drawn * self._weight)
