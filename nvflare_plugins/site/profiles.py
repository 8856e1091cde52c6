"""What each profile protects against whom: one row for policies, ``verify``, the report, plans and docs/security.

Everyone is honest but curious, but for what stands under ``changed``. The entries say what the named parties learn
about another site's rows beyond the trained model and the public job. W is the number of sites.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

SAFE_CODECS = frozenset({"MASKED", "SEALED"})
"""Under every profile scales are agreed under masks and keys are sealed."""
SERVER_ALONE = "server alone"


class Family(Enum):
    """Which jobs a profile is of, and whether a policy says if they may use it."""

    HORIZONTAL = "horizontal"
    VERTICAL = "vertical"
    PRIVATE = "private"
    ALIGNMENT = "alignment"  # not a choice that a policy makes: a data set with an id column may be aligned
    BAGGING = "bagging"  # nor this: a consent says whether
    INFERENCE = "inference"  # not a choice either: budgets and consents of a policy say what is allowed

    @property
    def is_chosen(self) -> bool:
        """Whether a policy lists the profiles of these jobs that it allows."""
        return self in (Family.HORIZONTAL, Family.VERTICAL, Family.PRIVATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """Who learns what of another site's rows, beyond the model and the public job.

    Attributes:
        summary: one sentence for people.
        server_alone, one_site, server_and_one_site, all_but_one: what these learn.
        notes: further things to know before choosing the profile.
    """

    summary: str
    server_alone: str
    one_site: str
    server_and_one_site: str
    all_but_one: str
    notes: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, str]]:
        """Return (who looks, what they learn) in the order of the table."""
        return [
            ("the server alone", self.server_alone),
            ("one site", self.one_site),
            ("the server and one site", self.server_and_one_site),
            ("W-1 sites together", self.all_but_one),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreatModel(Statement):
    """What remains visible under one profile, by who looks.

    Attributes:
        codecs: protections under which a private message may travel; anything else is a leak.
        changed: what becomes of a server that changes, drops, doubles or replays what it adds or hands on.
        ciphertexts: protection that gradients and their sums need inside sealed messages; None if the profile has no
            such messages.
        family: of which jobs it is.
        is_default: whether a policy allows it until a site says otherwise.
        noise: what protects a masked message, where that is noise as well.
        opened_by: who opens a single site's contribution, where that takes less than all others together.
        replaced_by: what does its work, if it was removed; policies that name it load, and past evidence verifies.
    """

    profile: str
    changed: str
    codecs: frozenset[str] = SAFE_CODECS
    ciphertexts: str | None = None
    family: Family = Family.HORIZONTAL
    is_default: bool = False
    noise: str = ""
    opened_by: str = ""
    replaced_by: str = ""

    def rows(self) -> list[tuple[str, str]]:
        """Return (who looks, what they learn), and what becomes of a server that cheats."""
        return [*Statement.rows(self), ("a server that cheats", self.changed)]


TAGGED = (
    "Noticed (since 0.4.0) by every site before it uses a sum; the job ends. Not if the server colludes with a site or "
    "took part in the key agreement of an unsigned session."
)
_HANDED_ON = (
    "Noticed, by seals, signatures and (since 0.4.0) MACs under the keys of pairs. Not if the server took part in the "
    "key agreement of an unsigned session."
)
_POOLED = (
    "The pooled sums that training needs, those of small nodes included, and the agreed cut points. With W = 2 the "
    "pooled sum minus its own is the other site's."
)
_TIMING = (
    "Sizes, order and timing of messages, what the job says, and the pooled metrics of each round unless "
    "tracking=False. No contribution and no other sum."
)
_SIZES = "Sizes, order and timing of sealed messages, and what the job says. No bit of any row."
_NODE_SIZES = (
    "Sizes, order and timing of sealed messages, and what the job says. Sizes tell how many rows reach which party's "
    "nodes. No bit of any row."
)
_VERTICAL_PARTY = (
    "A passive party: which rows are in the nodes whose sums it is asked for, and its own splits; no gradient, label, "
    "leaf or foreign threshold. The active party: sums per bin of every node, never a passive party's value or "
    "threshold. In the preset `exact` the sums tell in which bin each row lies. `guarded` has floors and caps: "
    "heuristics. `noised` sums are differentially private given the split bits, which are exact. In `sealed` no sum "
    "opens: it learns who wins each node, and the split bits."
)
_VERTICAL_NOTES = (
    "What the sums per bin tell cannot be hidden by encryption: their reader is the active party. Real cures are noise "
    "on the bins (the preset noised, or dp_local), sums that never open (the preset sealed), few bins, few trees.",
    "A passive party that cheats can read single labels by returning chosen rows as bins: parties are honest but "
    "curious.",
    "Passive parties see the partitions of the nodes they are asked about; Completely SecureBoost keeps those of the "
    "first trees at home.",
    "A job of kind vertical_tuning is many trainings over the same rows, for which each policy gives its consent "
    "(tuning). Folds and scores stay at the active party: a fold's rows have encrypted gradients of zero. Under plain "
    "these are open, and with them the folds.",
    "Federated prediction shows each passive party the paths of rows through its own nodes, and gives the active party "
    "one bit per row and node on the path.",
)
_NOISED = "The noised sums, which the guarantee covers, and its own share of the noise."
_DP_NOTES = (
    "The guarantee is about one row of the union of all sites, not about a site as a whole; a person with u rows costs "
    "u times as much (in mu of Gaussian differential privacy), which the ledger counts. No site sees a person's rows "
    "at the others: rows_per_person must be the most that one person has at all sites together.",
    "Feature bounds, category lists, the number of rows behind delta and the tree structure's seed are public: whoever "
    "writes the job must not take them from the data.",
    "What a job cannot use (a third class, an infinite value, a missing label) is left out or repaired at the site, "
    "and only its own log says so. A file that cannot be read at all ends the job in one fixed text: that is seen, and "
    "no epsilon covers it.",
    "The ledger of each site says what was spent over all jobs, and refuses a job that would overdraw it.",
)
_LAST_SITE = "Everything the last site sends: pooled sums minus their own contributions."

THREAT_MODELS = {
    model.profile: model
    for model in (
        ThreatModel(
            profile="plain",
            opened_by=SERVER_ALONE,
            codecs=SAFE_CODECS | {"PLAIN", "PLAIN_32"},
            changed="Sums: unnoticed, if all sites are told the same. Nothing is protected under this profile.",
            summary="No protection of sums: the server reads every site's contributions.",
            server_alone="Every site's histograms, label means, counts and metric parts, in clear.",
            one_site=_POOLED,
            server_and_one_site="Every site's contributions: the server reads them anyway.",
            all_but_one=_LAST_SITE,
            notes=("For tests and comparison. A site's policy can forbid this profile.",),
            ciphertexts="CLEAR",
        ),
        ThreatModel(
            profile="masks",
            is_default=True,
            codecs=SAFE_CODECS | {"MASKED_32"},
            changed=TAGGED,
            summary="Pairwise masks on exact integers; the sum itself is blinded from the server.",
            server_alone=_TIMING,
            one_site=_POOLED,
            server_and_one_site="The pooled sums, as that site does; no single contribution if two others are honest.",
            all_but_one=_LAST_SITE,
            notes=("Exact sums, 8 bytes a value, or 4 in histograms of 32-bit words. No key opens a contribution.",),
        ),
        ThreatModel(
            profile="bfv",
            is_default=True,
            codecs=SAFE_CODECS | {"BFV"},
            changed=TAGGED,
            summary="BFV homomorphic encryption with pairwise masks inside the ciphertext.",
            server_alone=_TIMING,
            one_site=_POOLED + " Holds the secret key, but receives only sums.",
            server_and_one_site="Can decrypt contributions but finds masked values inside; learns the pooled sums "
            "only, while two other sites are honest.",
            all_but_one=_LAST_SITE,
            notes=(
                "Exact sums. One secret key at all sites; the masks inside are what stops server and site together.",
            ),
        ),
        ThreatModel(
            profile="ckks",
            opened_by="server + 1 site",
            codecs=SAFE_CODECS | {"CKKS"},
            changed=f"{TAGGED} An honest sum that CKKS rounds wrong, once in 2^40 messages, ends the job too.",
            summary="CKKS homomorphic encryption on a grid that makes sums exact.",
            server_alone=_TIMING,
            one_site=_POOLED + " Holds the secret key, but receives only sums.",
            server_and_one_site="EVERY SITE'S CONTRIBUTIONS: the site has the secret key, the server the ciphertexts.",
            all_but_one=_LAST_SITE,
            notes=(
                "One secret key at all sites and no masks inside: safe only where the server colludes with no site.",
                "Policy can forbid this profile; masks and bfv do not have this weakness.",
                "A site that takes a decrypted sum apart sees its noise. Every site adds noise below the grid, so that "
                "the remainders of single sites' encodings are lost in it; for masks and bfv this needs no noise.",
            ),
        ),
        ThreatModel(
            profile="paillier",
            family=Family.VERTICAL,
            is_default=True,
            changed=_HANDED_ON,
            summary="Vertical: gradients leave the active party as Paillier ciphertexts, sums return re-randomised.",
            server_alone=_NODE_SIZES,
            one_site=_VERTICAL_PARTY,
            server_and_one_site="What that party learns; messages between two others stay sealed.",
            all_but_one="All passive parties: the partitions of all nodes. The active one and all but one passive "
            "party: what the active party learns of the last one.",
            notes=("2048-bit keys have 112-bit strength, 3072-bit keys 128.", *_VERTICAL_NOTES),
            ciphertexts="PAILLIER",
        ),
        ThreatModel(
            profile="okamoto_uchiyama",
            family=Family.VERTICAL,
            replaced_by="elgamal",
            changed="As under `paillier`.",
            summary="Vertical, as paillier, with the more brittle Okamoto-Uchiyama scheme of versions up to 0.10.",
            server_alone="As under `paillier`.",
            one_site="As under `paillier`.",
            server_and_one_site="As under `paillier`.",
            all_but_one="As under `paillier`.",
            notes=(
                "Whoever sees one decryption beyond the plaintext bound learns the key: safe only while every opened "
                "sum is checked, as it is here.",
                *_VERTICAL_NOTES,
            ),
            ciphertexts="OKAMOTO_UCHIYAMA",
        ),
        ThreatModel(
            profile="elgamal",
            family=Family.VERTICAL,
            changed="As under `paillier`.",
            summary="Vertical: gradients leave the active party as additive ElGamal on ristretto255's curve, digit by "
            "digit; sums return re-randomised.",
            server_alone="As under `paillier`.",
            one_site="As under `paillier`, but that the active party sees the sum of each of the two digits of every "
            "sum, two numbers where paillier shows one; guards count them so.",
            server_and_one_site="As under `paillier`.",
            all_but_one="As under `paillier`.",
            notes=(
                "128-bit strength under the decisional Diffie-Hellman assumption on the curve. Points of small order "
                "that a key owner plants are cleared; a sum out of range is not decrypted at all.",
                "How long the active party searches for a sum depends on the sum: a passive party sees that time "
                "rounded up to a power of two of a sixteenth of a second.",
                *_VERTICAL_NOTES,
            ),
            ciphertexts="ELGAMAL",
        ),
        ThreatModel(
            profile="dp_distributed",
            family=Family.PRIVATE,
            is_default=True,
            noise="the site's share of discrete noise, then pairwise masks, sum blinded: server sees neither "
            "contribution nor sum",
            changed=TAGGED,
            summary="Differential privacy; each site adds its share of the noise under masks.",
            server_alone="Sizes, order and timing of messages and what the job says. No contribution, no sum.",
            one_site=_NOISED,
            server_and_one_site="The noised sums; the guarantee counts up to the stated number of colluding sites.",
            all_but_one="With more colluders than the job states, the last site's sums under its own share alone.",
            notes=_DP_NOTES,
        ),
        ThreatModel(
            profile="dp_trusted",
            family=Family.PRIVATE,
            noise="pairwise masks, sum readable: server sees the exact sum, which it is trusted with, no contribution, "
            "and adds the noise",
            changed="Unnoticed, if all sites are told the same: it is trusted with sums, and adds the noise.",
            summary="Differential privacy; a trusted server sees exact sums and adds the noise once.",
            server_alone="The exact sums over all sites: it is trusted with them. No single contribution.",
            one_site="The noised sums, which the guarantee covers.",
            server_and_one_site="The exact sums minus that site's own part.",
            all_but_one="The noised sums; with the server, the last site's exact sums.",
            notes=_DP_NOTES,
        ),
        ThreatModel(
            profile="dp_local",
            family=Family.PRIVATE,
            noise="noise on each row's report, then pairwise masks, sum blinded: server sees neither contribution nor "
            "sum",
            changed=f"{TAGGED} Buckets: sealed; they do not open if they were changed.",
            summary="Local differential privacy: every row's report is noised at its owner before anything is sent.",
            server_alone=_SIZES,
            one_site="Trees: sums of rows' reports, each noised by itself; the guarantee is for a whole report, leaf "
            "included. Buckets, at the active party: randomised values; the guarantee is for one value, the epsilons "
            "of a row's values adding up, or for a row if the job says so.",
            server_and_one_site="As that site.",
            all_but_one="Trees: the last site's sum of noised reports. Buckets: as one site.",
            notes=(
                "Trees: the guarantee is about all reports of a row. Buckets: about one value of one row, or about a "
                "row if the job says so; the active party's rows and the labels are not covered. A person with several "
                "rows is protected less.",
                *_DP_NOTES[1:],
            ),
        ),
        ThreatModel(
            profile="psi",
            family=Family.ALIGNMENT,
            changed=_HANDED_ON,
            summary="Alignment: private set intersection by commutative blinding in ristretto255, sealed.",
            server_alone="Order and timing of sealed blocks, and the largest set's size rounded up.",
            one_site="The sizes of all sets and which of its own ids all sites have. With W > 2, some sites learn how "
            "many ids some of them share.",
            server_and_one_site="What that site learns.",
            all_but_one="Which of their common ids the last site has too, and sizes of its intersections with theirs.",
            notes=(
                "A site learns whether the ids that it brings are at all others: whoever brings invented or bought ids "
                "asks about those. Registry, size ratio and least intersection limit that; they do not prevent it.",
            ),
        ),
        ThreatModel(
            profile="own_trees",
            family=Family.BAGGING,
            changed=_HANDED_ON,
            summary="Bagging: each site's trees, grown on its own rows alone, sealed for the other sites.",
            server_alone="Order and timing of sealed messages, all of one size, and what the job itself says. No tree.",
            one_site="EVERY OTHER SITE'S OWN TREES, site by site: thresholds that are values of single rows, leaves "
            "that are statistics of its rows (of at least min_rows_per_node of them), and which columns they use.",
            server_and_one_site="As that site.",
            all_but_one="As one site: nothing of a site's trees is pooled, so that more sites learn no more.",
            notes=(
                "Nothing is summed: each leaf is a function of the labels of one site's rows, and many trees over the "
                "same rows give many equations about them. Histogram training shows pooled sums only; choose it unless "
                "the sites' trees may be known.",
                "Sums of hessians, gains and weights of inner nodes are not shared. The thresholds are candidates from "
                "the site's own quantiles: values of single rows, whatever exact_cuts says.",
                "Sites refuse such jobs unless their policy consents (share_own_trees). A site with fewer rows than "
                "its min_effective_rows or min_rows_per_node takes no part.",
            ),
        ),
        ThreatModel(
            profile="vertical_model",
            family=Family.INFERENCE,
            changed=_HANDED_ON,
            summary="Use of a finished vertical model: questions along paths of rows, sealed between the parties.",
            server_alone=_NODE_SIZES,
            one_site="A passive party: which rows reach its own nodes; not the answer of the model. The active party: "
            "one ordered bit per row and node on its path. If the owners consent, `explain` tells it the positions of "
            "rows among their thresholds and which values are missing, `merge` the thresholds themselves.",
            server_and_one_site="What that party learns; messages between two others stay sealed.",
            all_but_one="The active party and all but one passive party: what the active party learns of the last one.",
            notes=(
                "Rows are named by position in an aligned set. Budgets in each party's policy bound how often a row is "
                "asked for. An owner answers for a row along one path of a tree at most; which way the row went at "
                "nodes of others it must believe the active party.",
                "Predictions are at the active party alone. Many predictions tell about a passive party's values: each "
                "is an inequality with an unknown threshold.",
            ),
        ),
    )
}

OF_SCHEMES = replace(
    THREAT_MODELS["paillier"],
    profile="scheme.NAME",
    is_default=False,
    summary="Vertical: gradients leave the active party as ciphertexts of a plugin's scheme; sums are hidden.",
    notes=_VERTICAL_NOTES,
    ciphertexts="PLUGIN",
)
"""Who learns what where the additive scheme of a vertical job is a plugin's, and holds what it claims."""


def profiles_of(family: Family) -> tuple[str, ...]:
    """Return the profiles of a family, without those that were removed."""
    return tuple(name for name, one in THREAT_MODELS.items() if one.family is family and not one.replaced_by)


PROFILES = tuple(name for name, one in THREAT_MODELS.items() if one.family.is_chosen and not one.replaced_by)
"""Those among which a policy chooses."""
DEFAULT_PROFILES = tuple(name for name, one in THREAT_MODELS.items() if one.is_default)
REMOVED_PROFILES = {name: one.replaced_by for name, one in THREAT_MODELS.items() if one.replaced_by}
"""Profiles that earlier versions had, and what does their work."""
