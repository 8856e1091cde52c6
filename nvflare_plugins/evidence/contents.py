"""What single parties say to each other inside sealed messages, for evidence and report.

A sealed message hides its content from the server. These names say what it was, and under which protection its reader
received it: in clear, because the algorithm lets that reader see it, or under a scheme that it cannot open.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

PAID_IN = "paid_in"
"""A fact of a session's protection: the job whose buckets this one was trained on; nothing new was sent or paid."""


class Protection(Enum):
    """How a content is protected from the party that receives it."""

    CLEAR = "readable by the party it was sent to, sealed from everyone else"
    PAILLIER = "Paillier ciphertexts: readable with the active party's key only"
    OKAMOTO_UCHIYAMA = "Okamoto-Uchiyama ciphertexts: readable with the active party's key only"
    ELGAMAL = "ElGamal ciphertexts on a curve: readable with the active party's key only"
    BLINDED = "blinded group elements of private set intersection"
    LOCAL_DP = "each value randomised at its owner (local differential privacy)"


@dataclass(frozen=True, slots=True)
class _Facts:
    encrypted: bool
    meaning: str
    only: Protection | None = None
    profile: str | None = None


class Content(Enum):
    """One kind of content. ``encrypted`` ones must be ciphertexts under every profile but ``plain``."""

    SCHEMA = _Facts(False, "row counts, numbers of bins, aliases of features")
    SETUP = _Facts(False, "public key, number format, settings of the training")
    GRADIENTS = _Facts(True, "gradient pairs of the rows")
    HISTOGRAM_REQUEST = _Facts(False, "rows of the nodes whose sums are asked for")
    HISTOGRAMS = _Facts(True, "sums of gradient pairs per bin")
    SPLITS = _Facts(False, "bins of the splits that a party won")
    PARTITIONS = _Facts(False, "one bit per row of a node that the sender splits")
    DECISION_REQUEST = _Facts(False, "rows and nodes on their paths")
    DECISIONS = _Facts(False, "one bit per row and node on its path")
    THRESHOLDS = _Facts(False, "thresholds of the sender's splits, with its consent", profile="vertical_model")
    POSITIONS = _Facts(
        False, "places of rows among the sender's thresholds, with its consent", profile="vertical_model"
    )
    BLINDED_IDS = _Facts(False, "blinded ids for private set intersection", Protection.BLINDED)
    BUCKETS = _Facts(False, "randomised bucket of each value", Protection.LOCAL_DP)

    @property
    def encrypted(self) -> bool:
        """Whether profiles with an additive scheme send it as ciphertexts."""
        return self.value.encrypted

    @property
    def only(self) -> Protection | None:
        """The one protection under which it may be sent; None if the profile decides."""
        return self.value.only

    @property
    def profile(self) -> str | None:
        """The one profile under whose jobs it may be sent; None if there are several."""
        return self.value.profile

    @property
    def meaning(self) -> str:
        """What it is, for people."""
        return self.value.meaning
