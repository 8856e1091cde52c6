"""What evidence, report and pages say of the profiles: protection in words, and notes."""

from __future__ import annotations

from nvflare_plugins.site.profiles import OF_SCHEMES, SAFE_CODECS, SERVER_ALONE, THREAT_MODELS, Family
from nvflare_plugins.site.profiles import Statement as Statement  # plugins of others import it from here
from nvflare_plugins.wire.profiles import PLUGIN, SCHEME, plugin_of

CODEC_PROTECTION = {
    "PUBLIC": "public content, nothing to protect",
    "PLAIN": "NONE: readable by the server",
    "MASKED": "pairwise masks, sum blinded: server sees neither contribution nor sum",
    "BFV": "BFV with masks inside: server has no key; server + one site see only masked values",
    "CKKS": "CKKS: server has no key; server + one site can open every contribution",
    "SEALED": "sealed end to end between sites: server sees size and timing",
    "PLUGIN": "a plugin's processor, and what it claims: the server adds words that it knows nothing of",
    "PLUGIN_BYTES": "a plugin's processor, and what it claims: the server adds bytes by the plugin's own code",
    "MASKED_32": "pairwise masks on words of 32 bits, sum blinded: server sees neither contribution nor sum",
    "PLAIN_32": "NONE: readable by the server",
}

PLUGIN_CODECS = SAFE_CODECS | {"PLUGIN", "PLUGIN_BYTES"}

_NOTES_FOR_HORIZONTAL = (
    "The trained model is known to every site. Its thresholds are agreed cut points (with cuts=quantile found without "
    "dividing a bracket of fewer than k rows, with cuts=exact real data values) and its leaves are statistics of rows. "
    "Copies that leave a site carry no sum_hessian, which removes row counts but not what thresholds and leaves tell.",
    "Under reg:absoluteerror and reg:quantileerror each leaf, and the base score, is a mean of the sites' own "
    "quantiles of labels: where one site alone has rows in a leaf, it holds the label of one of them. Sites refuse "
    "such jobs unless their policy consents (exact_leaves). In vertical jobs leaves stay at the party that has the "
    "labels.",
    "Every site sees pooled sums of small nodes and bins; one that holds one row shows that row's gradient, not whose "
    "row it is. With cuts=uniform or logarithmic, and with category lists, whoever writes the job chooses the bins.",
    "Under survival:cox the sites also learn, of every bin of times, the pooled events and before each round the "
    "pooled sum of weight times hazard ratio of its rows. A bin holds at least min_rows_per_cut pooled events, or "
    "min_rows_per_node if that is more. From its change over a tree follows how many rows of the bin "
    "each leaf has, single ones too.",
    "Of rankings the sites also learn the number of queries, of each site under lambdarank_pair_method=mean. With "
    "compare_queries, which needs every policy's consent, a site learns which of its queries another site has, and can "
    "test guessed names.",
    "With pooled_metrics, which needs every policy's consent (score_histogram), the sites also learn the pooled "
    "evaluation rows of each class by bins of the final model's probability, at least k of each in a bin, and the "
    "edges, which tell of one site's scores.",
    "A job of kind tuning or selection, which needs every policy's consent to its size (tuning), trains on all rows "
    "but those of each fold: the sites learn sums over the rows of every fold, at least 1,000 of all sites together, "
    "and the metrics of every model. Nothing adds up what several such jobs on the same rows tell. A selection may "
    "also show scores of columns that each site has permuted and, with feature_profile, rows of classes by fold and "
    "bin.",
    "Number formats are agreed by a secure maximum of powers of two, from which a site learns the largest of the "
    "others: about the rows times the label size of the largest other site.",
    "Sites are honest but curious, and so is the server but for what it does to sums. Malformed bytes end the job; "
    "dishonest training inputs are not detected.",
    "Two runs that differ by a site or by some rows reveal the difference; each site's registry refuses such re-runs "
    "unless its own policy consents.",
)

_NOTES_FOR_OTHERS = (
    "Parties are honest but curious. Malformed bytes end the job; dishonest training inputs are not detected.",
)

_NOTES_FOR_ALL = (
    "This is about VeilBoost's messages. Whether FLARE shows more is for each site's set-up: after `veilboost "
    "site-setup` no role runs shell commands or code of its own there, and only listed classes start. A site that "
    "FLARE's defaults rule gives a hostile server, and a project's administrator, whatever its process can read.",
)


def notes_for(profile: str) -> tuple[str, ...]:
    """Return what else to know of a profile: of a plugin's, without its own notes. Nothing for an unknown one."""
    model = OF_SCHEMES if SCHEME.fullmatch(profile) else THREAT_MODELS.get(profile)
    if model is None and plugin_of(profile) is None:
        return ()
    of_kind = _NOTES_FOR_HORIZONTAL if is_horizontal(profile) else _NOTES_FOR_OTHERS
    return (*(model.notes if model else ()), *of_kind, *_NOTES_FOR_ALL)


def protection_text(profile: str, kind: str, codec: str, *, private: bool) -> str:
    """Return in words what protected a message, and against whom.

    Args:
        profile: of the attempt; under differential privacy sums carry noise beside their masks.
        kind, codec, private: of the message, as the evidence names them.
    """
    if not private:
        return CODEC_PROTECTION["SEALED"] if codec == "SEALED" else "public, nothing to protect"
    model = THREAT_MODELS.get(profile)
    if model is not None and model.noise and codec == "MASKED" and kind != "SCALE":
        return model.noise
    return CODEC_PROTECTION.get(codec, "UNKNOWN")


def is_horizontal(profile: str) -> bool:
    """Tell whether a profile protects sums of horizontal training."""
    model = THREAT_MODELS.get(profile)
    return PLUGIN.fullmatch(profile) is not None or (model is not None and model.family is Family.HORIZONTAL)


def leakage_class(profile: str, n_sites: int) -> str:
    """Name in a few words who can open a single site's contributions under ``profile``.

    Raises:
        KeyError: unknown profile.
    """
    opened_by = THREAT_MODELS[profile].opened_by
    if n_sites == 2 and opened_by != SERVER_ALONE:
        return "the other site (W = 2)"
    return opened_by or f"{n_sites - 1} sites together"
