"""The values of a site's policy: profiles, consents, floors, and what a job asks for in its words."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, Field

from nvflare_plugins.base.checks import expect
from nvflare_plugins.base.declared import AS_GIVEN, STRICT, Document, Flag, Words, document
from nvflare_plugins.data.declaration import MOST_ROWS, CountOrNone

POLICY_FILE = Path("local") / "veilboost.json"
SERVER_POLICY_FILE = Path("local") / "veilboost_server.json"
ARITHMETIC = ("auto", "cuda", "ifma", "avx2", "portable", "gmpy2")
_PRIVATE = "dp_"
MOST_TUNING = 10_000_000
MIN_EFFECTIVE_ROWS = 100
FOLDERS = {
    "inputs": "inputs",
    "registry": "veilboost_registry/{site}",
    "ledgers": "veilboost_ledgers/{site}",
    "runs": "veilboost_runs",
}
"""Folders of a policy that leaves them out."""


def is_private(profile: str) -> bool:
    """Return whether a profile is one of differential privacy."""
    return profile.startswith(_PRIVATE)


def _as_installers_know_it(value: str) -> str:
    return re.sub(r"[-_.]+", "-", value).lower()  # PEP 503: all spellings of one are the same to installers


Days = Annotated[int, STRICT, Ge(1), Le(36_500), Words("a whole number of days, from 1 to 36500")]
_DISTRIBUTION = Words("a text, exactly as the package says it, such as 'acme-veil'")
_VERSION = Words("a text, exactly as the package says it, such as '1.2.0'")


@document
class PluginPin(Document):
    """The one release of a plugin that a site allows: distribution and version as installed, compared exactly."""

    WHAT = "the plugin"

    distribution: Annotated[
        str,
        STRICT,
        Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?$"),
        AfterValidator(_as_installers_know_it),
        _DISTRIBUTION,
    ]
    """Its name as installers know it."""
    version: Annotated[str, STRICT, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+!_-]{0,63}$"), _VERSION]
    """The only version that is imported."""
    sha256: Annotated[str, STRICT, Field(pattern=r"^([0-9a-f]{64})?$"), Words("64 hexadecimal digits")] = ""
    """Hash of its installed files (`python -m nvflare_plugins.conformance.pin DISTRIBUTION`), compared before anything
    is imported; empty compares the version alone.
    """

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@document
class Retention(Document):
    """How long a site keeps the folders of finished runs. What it remembers of them (`registry`, `ledgers`) stays."""

    WHAT = "retention"

    run_days: Days = 365
    """Days after which models, reports and all other files of a run may go."""
    evidence_days: Days = 3650
    """Days after which its record and evidence may go, too."""

    def __post_init__(self) -> None:
        expect("evidence_days must be run_days or more", self.evidence_days >= self.run_days)


@document
class Consents(Document):
    """What a site agrees to although it discloses more than the defaults do. None is given unless set."""

    WHAT = "consents"

    plain_profile: Flag = False
    """Private messages may leave in clear (profile `plain`)."""
    exact_cuts: Flag = False
    """Cuts may be exact order statistics: they disclose single real values, also of one row."""
    exact_leaves: Flag = False
    """Horizontal leaves may be means of the sites' own quantiles of labels (reg:absoluteerror, reg:quantileerror):
    where one site alone has rows in a leaf, it discloses the label of one of them.
    """
    compare_queries: Flag = False
    """Names of queries may be compared over the sites, for rankings that ask for it (`compare_queries`): a site learns
    which of its own stand at another one, and who guesses a name can test whether some other site has it.
    """
    fewer_than_three_sites: Flag = False
    """Jobs with one or two data-bearing sites: with two, the sum minus one's own part is the other's."""
    recompute_with_changes: Flag = False
    """Training again with another site set or changed rows: the difference of two runs shows what the changed site
    or rows contributed. A horizontal job over all rows of before and added ones needs it only where fewer than three
    sites have added rows, or fewer than 1000 in all; one that forgets persons (`forgets`) where so few are left out, or
    stay.
    """
    continue_without_site: Flag = False
    """Horizontal jobs with `on_lost_site="continue"`: where a site is lost, this one or another, the others train on
    without it. From the sums before and after they can estimate the lost site's own sums, in the first rounds and in
    shallow trees nearly exactly; a server can bring that about at any time. A later job that trains such a job again
    (`forgets`) may leave a site out, whose sums are then the exact difference.
    """
    second_quantile_search: Flag = False
    """A second quantile search, or other spaced cuts, over the same data."""
    exact_bins: Flag = False
    """Vertical training in the preset `exact`: the party with the label can work out in which bin of this site's
    features each row lies.
    """
    sealed_splits: Flag = False
    """Vertical training in the preset `sealed`: no sum opens where both parties follow the protocol. A party with the
    label that garbles another circuit than it says can read one bit of its choice of this site's exact sums for each
    node, also where `guarded` would keep them.
    """
    split_bits: Flag = False
    """Vertical training in the preset `noised`: sums per bin are paid for from the data set's budget, but on which side
    of this site's splits the rows of their nodes lie leaves as it is, beside the budget. The bits are counted, up to
    `vertical.max_split_bits_per_row`.
    """
    merge_model: Flag = False
    """This site's thresholds may be written into an ordinary model."""
    explain: Flag = False
    """Explanations of predictions: the party with the label learns where its rows lie among this site's thresholds."""
    share_own_trees: Flag = False
    """Bagging: the other sites get trees that were grown on this site's rows alone, with thresholds that are values
    of single rows, whatever `exact_cuts` says, and leaves that are statistics of its own rows.
    """
    score_histogram: Flag = False
    """Horizontal jobs with `pooled_metrics`: the sites learn how many evaluation rows of each class, of all sites
    together, lie in up to 64 bins of the final model's predicted probability, each of which holds at least
    `min_rows_per_cut` rows of each class at one site alone. Where this site's rows make the bins, their edges tell of
    its own scores. Jobs with other models on the same rows release further counts. Data sets with a privacy budget
    never take part.
    """
    feature_profile: Flag = False
    """Jobs of kinds `profile` and `selection`: the sites learn how many rows of each class, of all sites together, lie
    in bins of every feature, merged until each holds `min_rows_per_cut` rows of every class; and on the way, of runs of
    bins and each class, whether another site has so many rows there by itself and whether another one lacks its part of
    them. A training shows sums over finer bins. A selection counts by folds, with so many rows in each. Data sets with
    a privacy budget never take part.
    """
    tuning: Annotated[int, STRICT, Ge(0), Le(MOST_TUNING)] = 0
    """Jobs of kinds `tuning`, `selection` and `vertical_tuning`: most trials times folds times rounds of one job; 0
    allows none. A selection's trials are its sets of columns and `shadows`. Every trial trains on all rows but those of
    one fold, for each fold. Horizontal: the sites learn sums over the rows of each fold, at least 1,000 of all sites
    together, and the metrics of every model on them. Vertical: a passive party answers for as many trees. The number
    bounds one job's work and releases, not what several jobs tell. Data sets with a privacy budget never take part.
    """
    scoring: Flag = False
    """Standing scoring as a passive party of vertical jobs. In the place of `vertical.predictions_per_row` a row has a
    lifetime cap on distinct bits (`vertical.scoring_bits_per_row`) and this site a number of rows a day; a row whose
    model and values are as before is answered for nothing. Data sets may be aligned anew as often a day as
    `vertical.scoring_alignments_per_day` says, which tells the other parties which of their ids came and went; for that
    the party with the label consents too.
    """
    exact_use_of_budgeted_data: Flag = False
    """Jobs without differential privacy on a data set that has a privacy budget, in any role, and jobs on rows
    whose randomised buckets were sent. They are entered into no ledger: the budget then no longer bounds what others
    learn of the rows. Alignment reads ids alone and needs no such consent; it tells which ids a set has, also one with
    a budget.
    """

    def gives(self, name: str) -> bool:
        """Return whether a consent is given; ask only where its lack ends the job, so that what was used is known."""
        given = bool(getattr(self, name))
        noted = _USED.get()
        if given and noted is not None:
            noted.add(name)
        return given


Share = Annotated[float, STRICT, Ge(0), Le(1), AS_GIVEN, Words("a number from 0 to 1")]


@document
class ReleaseRules(Document):
    """What a model must keep before it may leave the site; the defaults are those of SACRO-ML where it has one.

    A group is all rows of the site for which the model predicts the same. Rows of other sites only make groups larger.
    A differentially private model is judged by `max_epsilon` and `max_delta` alone, which bound all the rest.

    Reference: AI-SDC/SACRO-ML, sacroml/attacks/structural_attack.py; ACRO, default.yaml (thresholds of 10).
    """

    WHAT = "the rules of release"

    min_group_rows: CountOrNone = 10
    """Fewest rows of a group, and of the rows of one class that the model's probabilities state of a group."""
    max_share_in_small_groups: Share = 0
    """Largest share of rows in groups below `min_group_rows`. Many trees of some depth give nearly every row a group of
    its own.
    """
    max_share_in_small_cells: Share = 0
    """Largest share of rows in groups of which the model states, as probability times rows, fewer than
    `min_group_rows` rows of a class, and more than none.
    """
    max_share_certain: Share = 0
    """Largest share of rows for which the model gives some class a probability of zero."""
    max_share_in_one_class_groups: Share = 1
    """Largest share of rows in groups whose rows, `min_group_rows` or more, all have one class. Where a class is rare
    that is common, and the model shows it to none who lacks the labels: 1 does not judge it.
    """
    min_leaf_rows: CountOrNone = 10
    """Fewest rows that a leaf is known to hold, of those that rows of the site reach: the site's own, or as many of all
    sites as the leaf's hessian tells at least.
    """
    min_degrees_of_freedom: Annotated[int, STRICT, Le(MOST_ROWS)] = 10
    """Fewest rows beyond the numbers that training has chosen: two for each split, one for each leaf (of several
    classes, one for each but one), one for each tree. Rows are the site's own, or as many of all sites as hessians tell
    at least.
    """
    allow_unnecessary_risk: Flag = False
    """Accept depth, rounds and `min_child_weight` that made models easiest to attack in a large study
    (arXiv:2502.09396): depth above 3, with more than 3 rounds and a `min_child_weight` of at most 1.5, 3 from 13 rounds
    on, 6 from 63.
    """
    max_epsilon: Annotated[float, STRICT, Gt(0), Le(1000), AS_GIVEN] = 10
    """Largest epsilon of a private model's job, at `max_delta`, as the site's ledger adds it up."""
    max_delta: Annotated[float, STRICT, Ge(0), Lt(1), AS_GIVEN] = 1e-5
    """Largest delta of a private model's job."""

    def fingerprint(self) -> str:
        """Return the SHA-256 of the rules, however their file is written."""
        stated = {name: float(value) for name, value in dataclasses.asdict(self).items()}
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


# Policies are values, which everything that asks for consents shares. Who asked in which attempt is no part of them,
# so it is noted by the thread of the attempt, within ``noting_consents`` alone.
_USED: ContextVar[set[str] | None] = ContextVar("consents used", default=None)


@contextmanager
def noting_consents() -> Iterator[set[str]]:
    """Collect the names of the consents that decide in this thread meanwhile."""
    used: set[str] = set()
    token = _USED.set(used)
    try:
        yield used
    finally:
        _USED.reset(token)


@dataclass(frozen=True, slots=True)
class JobTerms:
    """What a job asks of every site, in the words of the policy."""

    profile: str
    data_set: str
    exact_cuts: bool = False
    min_rows_per_cut: int = 10
    key_bits: int | None = None
    tracking: bool = False
    is_paid: bool = False  # what the job releases here is paid for from the data set's budget


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
