"""The additive scheme with encryption: Paillier, through he_processors.

One ciphertext per row and tree carries gradient and hessian; sums come back packed, many bins to a ciphertext, and
re-randomised, so that the key owner cannot tell which rows made them.

Security: the secret key stays with ``EncryptedGradientOwner``. Passive parties are honest but curious: one that returns
    chosen ciphertexts as sums would learn nothing itself, but could make the key owner's tree depend on it.
Reference: SecureBoost (Cheng et al., 2021), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import Decryptor, Scheme
from he_processors.bignum import registry
from he_processors.bignum.interface import Residues
from he_processors.ciphertext_wire import (
    CiphertextHeader,
    Content,
    decode_ciphertexts,
    decode_for_decryption,
    encode_ciphertexts,
)
from he_processors.errors import CapacityExceeded, ConfigurationError, ProtocolError
from he_processors.fixed_point import PackingLayout, PairFormat
from he_processors.histogram.planner import BinCodes, BinLayout, plan_level
from he_processors.histogram.sums import (
    BareEncryptions,
    BinNoise,
    BinSums,
    NodeTotal,
    decrypt_level,
    pack_and_hide,
    sum_bins,
)
from he_processors.key_bytes import public_key_from_bytes, public_key_to_bytes
from he_processors.paillier import (
    PaillierDecryptor,
    PaillierEncryptor,
    PaillierPrivateKey,
    PaillierPublicKey,
    Rerandomiser,
    owner_encryptor,
)
from nvflare_plugins.kinds.vertical.protocol.elgamal_scheme import elgamal_maker
from nvflare_plugins.kinds.vertical.protocol.gradient_scheme import (
    ClearHistogramMaker,
    HistogramAggregator,
    MaskStock,
    Timer,
    n_blocks_of,
    require_all_rows,
    rows_due,
    untimed,
)
from nvflare_plugins.kinds.vertical.protocol.messages import TrainingSetup

CLEAR_CODE = 0
_MOST_MASKS = 1 << 14  # encryptions of zero: 16 MB at 3072 bits
_MASKS_AT_ONCE = 1 << 6  # some hundredths of a second: a question waits so long at most


class EncryptedGradientOwner:
    """The active party's half: encrypts gradients, opens and checks sums."""

    is_streamed = True

    def __init__(self, encryptor: PaillierEncryptor, decryptor: Decryptor, pair_format: PairFormat):
        self.pair_format = pair_format
        self._encryptor = encryptor
        self._decryptor = decryptor
        self._packing = PackingLayout.fit(pair_format, encryptor.public_key.plaintext_bits)

    def begin_tree(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> None:
        """Do nothing ahead."""

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        """Encrypt each pair to one ciphertext, with a fresh randomiser."""
        header = self._header(Content.PAIRS, g.size)
        plaintexts = self.pair_format.plaintext_rows(g, h)
        return encode_ciphertexts(header, self._encryptor.arithmetic, self._encryptor.encrypt(plaintexts))

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Decrypt the sums of a level and check every node."""
        count = self._packing.n_ciphertexts(len(totals) * layout.n_slots)
        header = self._header(Content.PACKED_BINS, count)
        ciphertexts = decode_for_decryption(sums, header, self._encryptor.arithmetic)
        return decrypt_level(ciphertexts, self._decryptor, self._packing, layout, totals)

    def finish_sums(self, since_s: float) -> None:
        """Hide no time: that of decrypting depends on counts."""

    def fill(self, n_rows: int) -> None:
        """Make randomisers for the next tree while the passive parties work."""
        fill = getattr(getattr(self._encryptor, "randomisers", None), "fill", None)
        if fill is not None:
            fill(n_rows)

    def setup(self) -> TrainingSetup:
        """Return what passive parties need."""
        key = self._encryptor.public_key
        return TrainingSetup(
            key.scheme.value, self.pair_format.fraction_bits, self.pair_format.max_additions, public_key_to_bytes(key)
        )

    def pairs_message(self, n_rows: int, pieces: Sequence[bytes | memoryview]) -> bytes:
        """Put the header before pieces of pairs that were encrypted elsewhere, in wire form, in order."""
        return b"".join([self._header(Content.PAIRS, n_rows).to_bytes(), *pieces])

    def open_with(self, wrap: Callable[[Decryptor], Decryptor]) -> None:
        """Have sums decrypted elsewhere from now on. Args: wrap: takes what decrypts in this process."""
        self._decryptor = wrap(self._decryptor)

    def _header(self, content: Content, count: int) -> CiphertextHeader:
        return CiphertextHeader(self._encryptor.public_key, content, self._packing, count)


class EncryptedHistogramMaker:
    """A passive party's half: adds ciphertexts into bins, packs and hides the sums."""

    is_streamed = True

    def __init__(
        self,
        public_key: PaillierPublicKey,
        pair_format: PairFormat,
        backend: str = registry.AUTO,
        timer: Timer = untimed,
    ):
        """Args: timer: measures the stages "receive", "histogram", "pack" and "prepare"."""
        self._public_key = public_key
        self._timer = timer
        self._packing = PackingLayout.fit(pair_format, public_key.plaintext_bits)
        self._arithmetic = registry.open_backend(backend, public_key.modulus)
        self._rerandomiser = Rerandomiser(public_key, self._arithmetic)
        self._stock = MaskStock(self._rerandomiser, _MOST_MASKS, _MASKS_AT_ONCE)
        self._n_rows = 0
        self._blocks: list[Residues] = []
        self._pairs: Residues | None = None

    def hold(self, codes: BinCodes) -> None:
        """Keep nothing: codes come with each question."""

    def begin_tree(self, n_rows: int) -> None:
        """Forget the ciphertexts of the tree before."""
        self._n_rows, self._blocks, self._pairs = n_rows, [], None
        self._stock.begin_tree()

    def add_gradients(self, gradients: bytes) -> None:
        """Check and take the next block of ciphertexts."""
        n_due = rows_due(self._n_rows, len(self._blocks) if self._pairs is None else n_blocks_of(self._n_rows))
        header = CiphertextHeader(self._public_key, Content.PAIRS, self._packing, n_due)
        with self._timer("receive"):
            self._blocks.append(decode_ciphertexts(gradients, header, self._arithmetic))

    def sum_bins(
        self,
        codes: BinCodes,
        layout: BinLayout,
        node_rows: Sequence[NDArray[np.int32]],
        features: NDArray[np.int64] | None = None,
        noise: BinNoise | None = None,
    ) -> bytes:
        """Add ciphertexts into bins, pack many bins to a ciphertext and re-randomise."""
        if self._pairs is None:
            require_all_rows(self._n_rows, len(self._blocks))
            self._pairs = self._blocks[0] if len(self._blocks) == 1 else self._arithmetic.concat(self._blocks)
            self._blocks = []
        with self._timer("histogram"):
            bins = sum_bins(self._arithmetic, self._pairs, plan_level(codes, layout, node_rows))
            if noise is not None:
                bins = BareEncryptions(self._public_key, self._arithmetic).add(bins, noise, self._packing.pair_format)
        self._stock.use(self._packing.n_ciphertexts(len(bins)))
        with self._timer("pack"):
            hidden = pack_and_hide(bins, self._packing, self._rerandomiser)
            header = CiphertextHeader(self._public_key, Content.PACKED_BINS, self._packing, len(hidden))
            return encode_ciphertexts(header, self._arithmetic, hidden)

    def prepare(self, is_last: bool) -> bool:
        """Make some encryptions of zero ahead."""
        with self._timer("prepare"):
            return self._stock.prepare(is_last)


def gradient_owner(
    private_key: PaillierPrivateKey, pair_format: PairFormat, backend: str = registry.AUTO
) -> EncryptedGradientOwner:
    """Open the key owner's half."""
    encryptor = owner_encryptor(private_key, backend)
    return EncryptedGradientOwner(encryptor, PaillierDecryptor(private_key, backend), pair_format)


def histogram_maker(
    setup: TrainingSetup,
    n_rows: int,
    *,
    allow_clear: bool = False,
    backend: str = registry.AUTO,
    allow_toy_keys: bool = False,
    timer: Timer = untimed,
    tails: tuple[int, int] = (0, 0),
) -> HistogramAggregator:
    """Open a passive party's half from the active party's announcement.

    Args:
        allow_clear: accept gradients in the clear; only where the job names `plain` and the party's policy allows it.
        allow_toy_keys: accept keys that protect nothing; True in tests only.
        timer: measures the stages of the half.
        tails: of the noise on sums (``PairFormat``), as the job says; (0, 0) for exact sums.

    Raises:
        ProtocolError: the announcement does not fit the party's rows, or holds no usable key.
        ConfigurationError: it asks for what the party does not accept.
    """
    check_setup(setup, n_rows, allow_clear)
    if setup.scheme == CLEAR_CODE:
        announced = announced_format(setup, tails)
        return ClearHistogramMaker(timer, announced.n_words, announced.fraction_bits)
    if setup.scheme == Scheme.ELGAMAL.value:
        return elgamal_maker(setup, backend, timer, tails)
    pair_format = announced_format(setup, tails)
    public_key = unpack_public_key(setup.scheme, setup.public_key, allow_toy_keys=allow_toy_keys)
    return EncryptedHistogramMaker(public_key, pair_format, backend, timer)


def check_setup(setup: TrainingSetup, n_rows: int, allow_clear: bool) -> None:
    """Check an announcement against the party's rows and what it accepts. Raises: as ``histogram_maker``."""
    if setup.max_additions != n_rows:
        raise ProtocolError("the active party announced another number of rows")
    if setup.scheme == CLEAR_CODE and (not allow_clear or setup.public_key):
        raise ConfigurationError("the active party wants gradients in the clear, which this party does not accept")


def announced_format(setup: TrainingSetup, tails: tuple[int, int] = (0, 0)) -> PairFormat:
    """Return the announced format. Raises: ProtocolError, if there is none such."""
    try:
        return PairFormat(setup.fraction_bits, setup.max_additions, g_bound=1.0, h_low=0.0, h_high=1.0, tails=tails)
    except CapacityExceeded:
        raise ProtocolError("the active party announced a number format that no sum fits") from None


def unpack_public_key(scheme: int, data: bytes, *, allow_toy_keys: bool = False) -> PaillierPublicKey:
    """Read the public key of an announcement strictly, as ``public_key_from_bytes``.

    Raises:
        ProtocolError: not a usable key of the announced scheme.
    """
    public_key = public_key_from_bytes(data, allow_toy_keys=allow_toy_keys)
    if public_key.scheme.value != scheme:
        raise ProtocolError("the public key is not one of the announced scheme")
    return public_key
