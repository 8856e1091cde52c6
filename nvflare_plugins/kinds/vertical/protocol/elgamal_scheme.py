"""The additive scheme of profile ``elgamal``: rows of points on a curve, through he_processors.

One row of points per training row and tree carries the digits of gradient and hessian under one randomiser. Sums come
back bin by bin, each multiplied by 8 and re-randomised, so that the key owner sees the sums of digits and nothing of
the rows behind them.

Security: the secret scalars stay with ``ElGamalGradientOwner``. Passive parties are honest but curious, as under every
    additive scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.curve.interface import Curve, PointColumn, Points
from he_processors.curve.registry import AUTO, BACKEND_NAMES, open_curve
from he_processors.elgamal.bin_sums import (
    CELL_COST,
    Content,
    Hider,
    PointHeader,
    bin_summer,
    decode_points,
    encode_points,
    join_message,
    noise_points,
    open_message,
    read_rows,
)
from he_processors.elgamal.decryption import ElGamalDecryptor, draw_out
from he_processors.elgamal.encryption import (
    FRACTION_BITS,
    SHORT_FRACTION_BITS,
    DigitFormat,
    ElGamalEncryptor,
    ElGamalPrivateKey,
    ElGamalPublicKey,
    PointColumns,
    generate_elgamal_key,
)
from he_processors.errors import BackendUnavailable, ProtocolError
from he_processors.fixed_point import PairFormat
from he_processors.histogram.planner import BinCodes, BinLayout, plan_level
from he_processors.histogram.sums import BinNoise, BinSums, NodeTotal
from he_processors.key_bytes import secret_key_to_bytes
from nvflare_plugins.kinds.vertical.protocol.gradient_scheme import (
    MaskStock,
    Timer,
    require_all_rows,
    rows_due,
    untimed,
)
from nvflare_plugins.kinds.vertical.protocol.messages import TrainingSetup

REFERENCE = "reference"
_BLOCK_BINS = 1 << 16
_MOST_MASKS = 1 << 16  # some 50 MB
OpenRows = Callable[[NDArray[np.uint8], BinLayout, Sequence[NodeTotal]], list[BinSums]]
_MASKS_AT_ONCE = 1 << 12  # a hundredth of a second: a question waits so long at most


class ElGamalGradientOwner:
    """The active party's half: encrypts digits of gradients, opens and checks sums."""

    is_streamed = True

    def __init__(self, private_key: ElGamalPrivateKey, digits: DigitFormat, curve: Curve, timer: Timer = untimed):
        """Args: timer: measures the stage "search", which is a part of opening sums."""
        self.pair_format: PairFormat = digits
        self._digits, self._curve, self._timer = digits, curve, timer
        self._private_key = private_key
        self._encryptor = ElGamalEncryptor(private_key, curve)
        self._decryptor = ElGamalDecryptor(private_key, curve)
        self._open: OpenRows = self.open_rows

    def begin_tree(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> None:
        """Do nothing ahead."""

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        """Encrypt each pair to one row of points, with a fresh randomiser."""
        rows = self._encryptor.encrypt(self._digits.digits_of(g, h))
        return encode_points(self._header(Content.PAIRS, g.size), self._curve, rows)

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Decrypt sums and check every node."""
        body = open_message(sums, self._header(Content.BINS, len(totals) * layout.n_slots))
        opened: list[BinSums] = []
        n_nodes = max(1, _BLOCK_BINS // layout.n_slots)  # opened together: points in memory take many times their bytes
        for first in range(0, len(totals), n_nodes):
            of_block = totals[first : first + n_nodes]
            rows = slice(first * layout.n_slots, (first + len(of_block)) * layout.n_slots)
            opened += self._open(body[:, rows], layout, of_block)
        return opened

    def open_rows(self, body: NDArray[np.uint8], layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Decrypt and check sums in this process. Shapes: body: uint8[n_columns, n_nodes * n_slots, 64]."""
        columns = read_rows(body, self._curve, slice(None))
        return self._decryptor.open_level(columns, self._digits, layout, totals, lambda: self._timer("search"))

    def open_with(self, opener: OpenRows) -> None:
        """Have sums opened elsewhere from now on, by what does as ``open_rows``."""
        self._open = opener

    def finish_sums(self, since_s: float) -> None:
        """Wait for a public number of steps of time, because the passive party sees when its next question comes."""
        with self._timer("search"):
            draw_out(since_s)

    def fill(self, n_rows: int) -> None:
        """Make randomisers for the next tree while the passive parties work."""
        self._encryptor.fill(n_rows)

    def setup(self) -> TrainingSetup:
        """Return what passive parties need."""
        key = self._encryptor.public_key
        return TrainingSetup(key.scheme.value, self._digits.fraction_bits, self._digits.max_additions, key.to_bytes())

    def secret_bytes(self) -> bytes:
        """Return the key for the owner's own workers. Secret."""
        return secret_key_to_bytes(self._private_key)

    def pairs_message(self, n_rows: int, pieces: Sequence[bytes | memoryview]) -> bytes:
        """Put the header before pieces of columns of pairs that were encrypted elsewhere, in affine form, in order."""
        return join_message(self._header(Content.PAIRS, n_rows), pieces)

    def _header(self, content: Content, count: int) -> PointHeader:
        return PointHeader(self._encryptor.public_key, content, self._digits, count)


class ElGamalHistogramMaker:
    """A passive party's half: adds rows of points into bins, and hides the sums."""

    is_streamed = True

    def __init__(self, public_key: ElGamalPublicKey, digits: DigitFormat, curve: Curve, timer: Timer = untimed):
        """Args: timer: measures the stages "receive", "histogram", "hide" and "prepare"."""
        self._public_key, self._digits, self._curve, self._timer = public_key, digits, curve, timer
        self._hider = Hider(public_key, curve)
        self._stock = MaskStock(self._hider, _MOST_MASKS, _MASKS_AT_ONCE)
        self._n_rows = self._n_blocks = 0
        self._columns: list[PointColumn] = []  # of this tree
        self._pairs: PointColumns | None = None

    def hold(self, codes: BinCodes) -> None:
        """Keep nothing: codes come with each question."""

    def begin_tree(self, n_rows: int) -> None:
        """Forget the points of the tree before."""
        self._columns = []  # before the next ones need their memory
        self._n_rows, self._n_blocks, self._pairs = n_rows, 0, None
        self._stock.begin_tree()
        self._columns = [self._curve.column(n_rows) for _ in range(1 + self._digits.n_messages)]

    def add_gradients(self, gradients: bytes) -> None:
        """Check and take the next block of rows."""
        header = PointHeader(self._public_key, Content.PAIRS, self._digits, rows_due(self._n_rows, self._n_blocks))
        with self._timer("receive"):
            block = decode_points(gradients, header, self._curve)
            for column, points in zip(self._columns, block.columns, strict=True):
                column.append(points)
        self._n_blocks += 1

    def sum_bins(
        self,
        codes: BinCodes,
        layout: BinLayout,
        node_rows: Sequence[NDArray[np.int32]],
        features: NDArray[np.int64] | None = None,
        noise: BinNoise | None = None,
    ) -> bytes:
        """Add rows into bins, and hide every bin; one column after the other, so that one is in memory as points."""
        if self._pairs is None:
            require_all_rows(self._n_rows, self._n_blocks)
            self._pairs = PointColumns(tuple(column.whole() for column in self._columns))
        with self._timer("histogram"):
            plan = plan_level(codes, layout, node_rows, cell_cost=CELL_COST)
            add = bin_summer(self._curve, len(self._pairs), plan)
        self._stock.use(plan.n_slots)
        with self._timer("hide"):
            masks, hidden = self._hider.draw(plan.n_slots), []
        for number, column in enumerate(self._pairs.columns):
            with self._timer("histogram"):
                bins = add(column)
                if noise is not None and number > 0:
                    bins = self._curve.add(bins, noise_points(self._curve, self._digits, noise, number, len(bins)))
            with self._timer("hide"):
                hidden.append(self._hidden(number, bins, masks))
        header = PointHeader(self._public_key, Content.BINS, self._digits, plan.n_slots)
        return join_message(header, hidden)

    def prepare(self, is_last: bool) -> bool:
        """Make some masks ahead."""
        with self._timer("prepare"):
            return self._stock.prepare(is_last)

    def _hidden(self, number: int, bins: Points, masks: PointColumns) -> bytes:
        return self._curve.to_affine(self._hider.hide(number, bins, masks)).tobytes()


def elgamal_owner(digits: DigitFormat, backend: str = AUTO, timer: Timer = untimed) -> ElGamalGradientOwner:
    """Generate a key and open the half that holds it."""
    curve = _curve(backend)
    return ElGamalGradientOwner(generate_elgamal_key(digits.n_messages, curve), digits, curve, timer)


@dataclass(frozen=True, slots=True)
class ElGamalTerms:
    """What a passive party takes from the active party's announcement, checked."""

    public_key: ElGamalPublicKey
    digits: DigitFormat
    curve: Curve

    @classmethod
    def of(cls, setup: TrainingSetup, backend: str = AUTO, tails: tuple[int, int] = (0, 0)) -> ElGamalTerms:
        """Read an announcement. Raises: ProtocolError: it holds another number format, or no usable key."""
        if setup.fraction_bits not in FRACTION_BITS or (any(tails) and setup.fraction_bits != SHORT_FRACTION_BITS):
            raise ProtocolError("the active party announced a number format that elgamal does not have")
        curve = _curve(backend)
        digits = DigitFormat.of(setup.fraction_bits, setup.max_additions, tails)
        public_key = ElGamalPublicKey.from_bytes(setup.public_key, curve)
        if public_key.n_messages != digits.n_messages:
            raise ProtocolError("the public key has another number of points than the format has digits")
        return cls(public_key, digits, curve)


def elgamal_maker(
    setup: TrainingSetup, backend: str = AUTO, timer: Timer = untimed, tails: tuple[int, int] = (0, 0)
) -> ElGamalHistogramMaker:
    """Open a passive party's half from the active party's announcement.

    Raises:
        ProtocolError: it holds another number format, or no usable key.
    """
    terms = ElGamalTerms.of(setup, backend, tails)
    return ElGamalHistogramMaker(terms.public_key, terms.digits, terms.curve, timer)


def require_curve(backend: str = AUTO) -> None:
    """Refuse what would take hours.

    Raises:
        BackendUnavailable: this machine has no compiled backend of the curve.
    """
    _curve(backend)


def _curve(backend: str) -> Curve:
    """Open the curve; a backend of big numbers that has no curve leaves the choice to this machine."""
    curve = open_curve(backend if backend in BACKEND_NAMES else AUTO)
    if curve.name == REFERENCE:
        raise BackendUnavailable(
            "profile elgamal needs the C extension, which was not built when this package was installed: install it "
            "where there is a C compiler, or choose profile paillier"
        )
    return curve
