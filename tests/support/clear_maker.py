"""A passive party's half of the additive scheme in the clear, which takes any pairs."""

from nvflare_plugins.kinds.vertical.histogram_maker import ClearPairs, HistogramMaker, Timer, untimed


class ClearHistogramMaker(HistogramMaker):
    """Adds pairs in the clear, whatever their format: the other half of ``ClearGradientOwner``."""

    def __init__(self, timer: Timer = untimed, n_words: int = 1, is_streamed: bool = False) -> None:
        """Args: n_words: of a sum (``PairFormat.n_words``); is_streamed: sums come in blocks of features."""
        super().__init__(ClearPairs(None, n_words), timer)
        self.is_streamed = is_streamed
