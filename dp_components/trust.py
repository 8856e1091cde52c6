"""Who may see what before the noise is on it."""

from __future__ import annotations

from enum import Enum


class TrustModel(Enum):
    """The trust model of a private job; it stands in the job and in the evidence.

    Attributes:
        TRUSTED_AGGREGATOR: the server sees the exact sums and adds the noise once.
        DISTRIBUTED: each site adds its share of the noise under masks: nobody ever sees an exact sum of all sites.
        LOCAL: each site noises every row by itself; the sums are never exact anywhere else.
    """

    TRUSTED_AGGREGATOR = "trusted_aggregator"
    DISTRIBUTED = "distributed"
    LOCAL = "local"

    @property
    def description(self) -> str:
        """Say what is protected against whom, for report and evidence."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    TrustModel.TRUSTED_AGGREGATOR: (
        "The server sees exact sums and adds the noise once. The guarantee holds towards everyone who sees the noised "
        "sums and the model, not towards the server."
    ),
    TrustModel.DISTRIBUTED: (
        "Each site adds its share of the noise before the sums are masked. The guarantee holds towards the server and "
        "any coalition of as many sites as the job says, who know their own shares."
    ),
    TrustModel.LOCAL: (
        "Each row is noised at its own site before anything is added up. The guarantee holds towards everyone else, "
        "for what is noised: the row's gradients, or the values of its buckets, as the mechanism says."
    ),
}
