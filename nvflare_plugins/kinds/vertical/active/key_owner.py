"""The active party's half of the additive scheme for one job: fresh key, randomisers made ahead.

Security: the key is generated for the job, held in memory only, and gone when the job ends.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from he_processors.elgamal.encryption import DigitFormat
from he_processors.fixed_point import PairFormat
from he_processors.histogram.planner import BinLayout
from he_processors.histogram.sums import BinSums, NodeTotal
from he_processors.key_bytes import secret_key_to_bytes
from he_processors.paillier import generate_paillier_key
from nvflare_plugins.kinds.vertical.active.gradient_scale import pair_format
from nvflare_plugins.kinds.vertical.job import VerticalJob, VerticalProfile
from nvflare_plugins.kinds.vertical.noised import NoisePlan
from nvflare_plugins.kinds.vertical.protocol.elgamal_scheme import elgamal_owner
from nvflare_plugins.kinds.vertical.protocol.encrypted_scheme import CLEAR_CODE, gradient_owner
from nvflare_plugins.kinds.vertical.protocol.gradient_scheme import ClearGradientOwner, StockedOwner, Timer, untimed
from nvflare_plugins.kinds.vertical.protocol.messages import TrainingSetup
from nvflare_plugins.kinds.vertical.shards.owner import ShardedOwner
from nvflare_plugins.workers.workers import Workers


def open_owner(
    job: VerticalJob,
    n_rows: int,
    backend: str,
    timer: Timer = untimed,
    workers: Workers | None = None,
    noised: NoisePlan | None = None,
) -> tuple[StockedOwner | ClearGradientOwner, TrainingSetup]:
    """Generate the job's key and open the half that holds it.

    Args:
        backend: of arithmetic at this site.
        timer: measures the stage "search" of elgamal, a part of opening sums.
        workers: where to encrypt; None is this process. Gradients in the clear need none.
        noised: the plan of a job in the preset noised.

    Returns:
        The half, and what passive parties need.
    """
    if job.profile == VerticalProfile.ELGAMAL.value:
        digits = DigitFormat.of(job.fraction_bits, n_rows, (0, 0) if noised is None else noised.tails)
        points = elgamal_owner(digits, backend, timer)
        if workers is None:
            return points, points.setup()
        return ShardedOwner(points, workers, backend, points.secret_bytes()), points.setup()
    pairs = pair_format(n_rows, job.weight is not None) if noised is None else noised.pair_format(n_rows)
    if not job.is_encrypted:
        return ClearGradientOwner(pairs), TrainingSetup(CLEAR_CODE, pairs.fraction_bits, pairs.max_additions, b"")
    key = generate_paillier_key(job.key_bits)
    owner = gradient_owner(key, pairs, backend)
    if workers is None:
        return owner, owner.setup()
    return ShardedOwner(owner, workers, backend, secret_key_to_bytes(key)), owner.setup()


_MOST_STOCKED = 1 << 18  # randomisers: some 200 MB at 3072 bits
_FILL_STEP = 1 << 10  # randomisers made at a time: decryption, which others wait for, waits for one step at most


class PrecomputingKeyOwner:
    """An owner that makes the randomisers of the next tree while the passive parties work on this one.

    Encryption does not wait for all of them: what is missing then is made block by block, while blocks travel. A
    context manager: leaving it ends the making.
    """

    def __init__(self, owner: StockedOwner, n_rows: int, n_trees: int, timer: Timer = untimed):
        """Prepare for one training.

        Args:
            n_trees: of the whole training; nothing is made for more.
            timer: measures the stage "prepare", which runs beside others.
        """
        self.pair_format: PairFormat = owner.pair_format
        self.is_streamed = owner.is_streamed
        self._owner = owner
        self._timer = timer
        self._n_rows = n_rows
        self._n_due = n_rows * n_trees  # pairs that are not encrypted yet
        self._filling: threading.Thread | None = None
        self._may_fill = threading.Event()
        self._is_due = False  # the next tree's encryption, or the end

    def begin_tree(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> None:
        """Begin a tree."""
        self._stop_filling()
        self._owner.begin_tree(g, h)

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        """Encrypt each pair; after the last one of a tree, make ready for the next."""
        self._stop_filling()
        protected = self._owner.encrypt(g, h)
        self._n_due -= g.size
        if self._n_due > 0 and self._n_due % self._n_rows == 0:
            self._is_due = False
            self._filling = threading.Thread(target=self._fill, name="veilboost_randomisers", daemon=True)
            self._filling.start()
        return protected

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Decrypt the sums of a level and check every node."""
        self._may_fill.clear()
        try:
            return self._owner.open_sums(sums, layout, totals)
        finally:
            self._may_fill.set()

    def finish_sums(self, since_s: float) -> None:
        """Take note that all sums of a level were opened."""
        self._owner.finish_sums(since_s)

    def __enter__(self) -> PrecomputingKeyOwner:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_filling()

    def _fill(self) -> None:
        most = min(self._n_rows, _MOST_STOCKED)
        for n in range(_FILL_STEP, most + _FILL_STEP, _FILL_STEP):
            self._may_fill.wait()
            if self._is_due:
                return
            with self._timer("prepare"):
                self._owner.fill(min(n, most))

    def _stop_filling(self) -> None:
        self._is_due = True
        self._may_fill.set()
        if self._filling is not None:
            self._filling.join()
            self._filling = None
