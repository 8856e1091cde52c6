"""The values of a site's policy: profiles, consents, floors, and what a job asks for in its words."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

PROFILES = (
    "plain",
    "masks",
    "bfv",
    "ckks",
    "paillier",
    "okamoto_uchiyama",
    "dp_distributed",
    "dp_trusted",
    "dp_local",
)
DEFAULT_PROFILES = ("masks", "bfv", "paillier", "dp_distributed")
_PRIVATE = "dp_"
MIN_EFFECTIVE_ROWS = 100
MOST_ROWS = 2**53  # of any number in a policy: more would be no number any more for those who divide it


def is_private(profile: str) -> bool:
    """Return whether a profile is one of differential privacy."""
    return profile.startswith(_PRIVATE)


@dataclass(frozen=True, slots=True)
class PluginPin:
    """The one release of a plugin that a site allows: distribution and version as installed, compared exactly."""

    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True)
class Consents:
    """What a site agrees to although it discloses more than the defaults do. All are False unless set.

    Attributes:
        plain_profile: private messages may leave in clear (profile plain).
        exact_cuts: cuts may be exact order statistics: they disclose single real values, also of one row.
        exact_leaves: horizontal leaves may be means of the sites' own quantiles of labels (reg:absoluteerror,
            reg:quantileerror): where one site alone has rows in a leaf, it discloses the label of one of them.
        fewer_than_three_sites: jobs with one or two data-bearing sites: with two, the sum minus one's own part is
            the other's.
        recompute_with_changes: training again with another site set or changed rows: the difference of two runs
            shows what the changed site or rows contributed.
        second_quantile_search: a second quantile search, or other spaced cuts, over the same data.
        exact_bins: vertical training in the preset `exact`: the party with the label can work out in which bin of
            this site's features each row lies.
        merge_model: this site's thresholds may be written into an ordinary model.
        explain: explanations of predictions: the party with the label learns where its rows lie among this site's
            thresholds.
        share_own_trees: bagging: the other sites get trees that were grown on this site's rows alone, with thresholds
            between real values and leaves that are statistics of its own rows.
        exact_use_of_budgeted_data: jobs without differential privacy on a data set that has a privacy budget, in any
            role, and jobs on rows whose randomised buckets were sent. They are entered into no ledger: the budget then
            no longer bounds what others learn of the rows. (Alignment reads ids alone and needs no such consent; it
            tells which ids a set has, also one with a budget.)
    """

    plain_profile: bool = False
    exact_cuts: bool = False
    exact_leaves: bool = False
    fewer_than_three_sites: bool = False
    recompute_with_changes: bool = False
    second_quantile_search: bool = False
    exact_bins: bool = False
    merge_model: bool = False
    explain: bool = False
    share_own_trees: bool = False
    exact_use_of_budgeted_data: bool = False


@dataclass(frozen=True, slots=True)
class JobTerms:
    """What a job asks of every site, in the words of the policy."""

    profile: str
    data_set: str
    exact_cuts: bool = False
    min_rows_per_cut: int = 10
    key_bits: int | None = None
    tracking: bool = False


@dataclass(frozen=True, slots=True)
class Floors:
    """The least that the sites of a horizontal job ask for; all sites take the largest of all.

    Attributes:
        effective_rows: pooled effective rows of a job, see ``SitePolicy.min_effective_rows``.
        rows_per_node: pooled rows of a node, see ``SitePolicy.min_rows_per_node``.
        sites: sites that hold rows of positive weight.
    """

    effective_rows: int
    rows_per_node: int
    sites: int

    def largest(self, other: Floors) -> Floors:
        """Return what satisfies both."""
        return Floors(*(max(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self)))
