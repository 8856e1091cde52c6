"""Where a passive party's noise comes from: paid for tree by tree, drawn for each sum by itself."""

from __future__ import annotations

from collections.abc import Callable

from dp_components.randomness import OS_RANDOMNESS, RandomSource
from dp_components.vertical_bins import draw_bin_noise
from he_processors.errors import ProtocolError
from he_processors.histogram.bin_noise import BinNoise
from he_processors.histogram.bins import BinLayout
from nvflare_plugins.vertical.noised.plan import PartyNoise


class NoiseSource:
    """Draws the noise of one party in one job.

    Privacy: a tree's event is charged (``pay_tree``) before any of its noise is drawn, and none is drawn for a tree
        that was not. Every sum of every node has noise of its own, those of empty bins and of missing values too.
    """

    def __init__(self, noise: PartyNoise, pay_tree: Callable[[int], None], randomness: RandomSource = OS_RANDOMNESS):
        self._noise, self._pay_tree, self._randomness = noise, pay_tree, randomness
        self._paid_tree: int | None = None

    def check_tree(self, n_features: int) -> None:
        """Refuse a tree of more features than are paid for. Raises: ProtocolError."""
        if n_features > self._noise.features_per_tree:
            raise ProtocolError("a tree uses more features of this party than the preset noised pays for")

    def pay(self, tree: int) -> None:
        """Pay for a tree, once, before the first of its sums. Raises: as ``NoisePayment.pay_tree``."""
        self._pay_tree(tree)
        self._paid_tree = tree

    def draw(self, tree: int, n_nodes: int, layout: BinLayout) -> BinNoise:
        """Draw the noise of a block of sums. Raises: ProtocolError: the tree is not paid for."""
        if tree != self._paid_tree:
            raise ProtocolError("sums of a tree that was not paid for")
        return BinNoise(*draw_bin_noise(n_nodes * layout.n_slots, self._noise.scales, self._randomness))
