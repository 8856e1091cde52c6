"""What each profile protects against whom: one place for ``verify``, the report and the README.

Everyone is honest but curious. The entries say what the named parties learn about another site's rows beyond the
trained model and the public job. W is the number of sites.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThreatModel:
    """What remains visible under one profile, by who looks.

    Attributes:
        codecs: protections under which a private message may travel; anything else is a leak.
        summary: one sentence for people.
        server_alone, one_site, server_and_one_site, all_but_one: what these learn.
        notes: further things to know before choosing the profile.
    """

    profile: str
    codecs: frozenset[str]
    summary: str
    server_alone: str
    one_site: str
    server_and_one_site: str
    all_but_one: str
    notes: tuple[str, ...]

    def rows(self) -> list[tuple[str, str]]:
        """Return (who looks, what they learn) in the order of the table."""
        return [
            ("the server alone", self.server_alone),
            ("one site", self.one_site),
            ("the server and one site", self.server_and_one_site),
            ("W-1 sites together", self.all_but_one),
        ]


CODEC_PROTECTION = {
    "PUBLIC": "public content, nothing to protect",
    "PLAIN": "NONE: readable by the server",
    "MASKED": "pairwise masks, sum blinded: server sees neither contribution nor sum",
    "BFV": "BFV with masks inside: server has no key; server + one site see only masked values",
    "CKKS": "CKKS: server has no key; server + one site can open every contribution",
    "SEALED": "sealed end to end between sites: server sees size and timing",
}

_SAFE = frozenset({"MASKED", "SEALED"})  # under every profile scales are agreed under masks and keys are sealed

_POOLED = (
    "The pooled sums that training needs, those of small nodes included, and the agreed cut points. With W = 2 the "
    "pooled sum minus its own is the other site's."
)
_TIMING = (
    "Sizes, order and timing of the messages, what the job itself says, and the pooled metrics of each round unless "
    "the job sets tracking=False. No contribution and no other sum."
)
_LAST_SITE = "Everything the last site sends: pooled sums minus their own contributions."

NOTES_FOR_ALL = (
    "The trained model is known to every site. Its thresholds are agreed cut points (with cuts=quantile found without "
    "dividing a bracket of fewer than k rows, with cuts=exact real data values) and its leaves are statistics of rows. Copies that "
    "leave a site carry no sum_hessian, which removes row counts but not what thresholds and leaves tell.",
    "Every site sees pooled sums of small nodes and bins; one that holds one row shows that row's gradient, not whose "
    "row it is. With cuts=uniform or logarithmic, and with category lists, whoever writes the job chooses the bins.",
    "Number formats are agreed by a secure maximum of powers of two, from which a site learns the largest of the "
    "others: about the rows times the label size of the largest other site.",
    "Parties are honest but curious. Malformed bytes end the job; dishonest training inputs are not detected.",
    "Two runs that differ by a site or by some rows reveal the difference; each site's registry refuses such re-runs "
    "unless its own policy consents.",
)

THREAT_MODELS = {
    model.profile: model
    for model in (
        ThreatModel(
            profile="plain",
            codecs=_SAFE | {"PLAIN"},
            summary="No protection of sums: the server reads every site's contributions.",
            server_alone="Every site's histograms, label means, counts and metric parts, in clear.",
            one_site=_POOLED,
            server_and_one_site="Every site's contributions: the server reads them anyway.",
            all_but_one=_LAST_SITE,
            notes=("For tests and comparison. A site's policy can forbid this profile.",),
        ),
        ThreatModel(
            profile="masks",
            codecs=_SAFE,
            summary="Pairwise masks on exact integers; the sum itself is blinded from the server.",
            server_alone=_TIMING,
            one_site=_POOLED,
            server_and_one_site="The pooled sums, as that site does; no single contribution if two others are honest.",
            all_but_one=_LAST_SITE,
            notes=("Exact sums, 8 bytes a value. No key opens a contribution.",),
        ),
        ThreatModel(
            profile="bfv",
            codecs=_SAFE | {"BFV"},
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
            codecs=_SAFE | {"CKKS"},
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
    )
}


def markdown_table() -> str:
    """Return the table of all profiles as Markdown for the README."""
    models = list(THREAT_MODELS.values())
    lines = ["| what they learn | " + " | ".join(f"`{model.profile}`" for model in models) + " |"]
    lines.append("|---" * (len(models) + 1) + "|")
    for row in zip(*(model.rows() for model in models), strict=True):
        lines.append(f"| {row[0][0]} | " + " | ".join(what for _, what in row) + " |")
    return "\n".join(lines)


def leakage_class(profile: str, n_sites: int) -> str:
    """Name in a few words who can open a single site's contributions under ``profile``.

    Raises:
        KeyError: unknown profile.
    """
    if THREAT_MODELS[profile].profile == "plain":
        return "server alone"
    if n_sites == 2:
        return "the other site (W = 2)"
    return "server + 1 site" if profile == "ckks" else f"{n_sites - 1} sites together"
