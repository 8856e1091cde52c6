"""The plan of a profile: what a site sends, how long that takes, and who reads what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.plan import Plan, PlanRequest
from nvflare_plugins.base.formatting import human_bytes, human_seconds
from nvflare_plugins.kinds.profile.job import ProfileJob
from nvflare_plugins.pooled.plan import SESSION_EXCHANGES, Planned, cut_messages, message_bytes
from nvflare_plugins.pooled.row_floors import N_COUNTS
from nvflare_plugins.pooled.spans import spans_of
from nvflare_plugins.site.profiles import THREAT_MODELS
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.wire.profiles import plugin_of


def plan(request: PlanRequest, job: ProfileJob) -> Plan:
    """Return what a site sends, how long that takes and who reads what. Raises: ConfigurationError."""
    features = request.features if job.features is None else len(job.features)
    if features is None:
        raise ConfigurationError("give --features, the number of columns: they are not in the job")
    if plugin_of(job.profile) is not None:
        raise ConfigurationError(f"the messages of {job.profile} are its own: no plan")
    messages, network = list(profile_messages(job, features)), request.network
    sent = sum(one.messages * message_bytes(one, job.profile) for one in messages)
    exchanges = SESSION_EXCHANGES + sum(one.messages for one in messages)
    seconds = SESSION_EXCHANGES * network.latency_s + sum(
        one.messages * network.exchange_s(message_bytes(one, job.profile), request.sites) for one in messages
    )
    figures = {"features": features, "sites": request.sites, "bytes_sent": sent, "exchanges": exchanges}
    text = [
        f"{features} columns of up to {job.max_bin} bins, {job.n_classes} classes, {request.sites} sites",
        f"sent      at most {human_bytes(sent)} by each site, and as much received, in {exchanges} exchanges",
        f"network   {human_seconds(seconds)}, without the start of FLARE's processes and the reading of data",
        f"shows     all sites: rows of each class, over all sites, in bins of at least {job.min_rows_per_cut} of "
        "every class; missing values",
        "          by column; and of runs of bins whether some site has so many rows there (SECURITY.md)",
        "spends    nothing: data sets with a privacy budget are refused; every policy must consent (feature_profile)",
        f"privacy   {THREAT_MODELS[job.profile].summary}",
        "later     a training over the same data, sites, max_bin and min_rows_per_cut does not search again",
    ]
    return Plan({**figures, "network_s": seconds, "min_rows_per_class": job.min_rows_per_cut}, "\n".join(text))


def profile_messages(job: ProfileJob, features: int) -> Iterator[Planned]:
    """Yield a profile's sums; with fewer cut points or merged bins they are smaller."""
    listed = [len(entries) for entries in job.categories.values()]
    searched = features - len(listed)
    if searched < 0:
        raise ConfigurationError(f"the job has {len(listed)} categorical columns, and --features says {features}")
    yield Planned(Kind.EFFECTIVE_ROWS, 1, 2 + N_COUNTS, wide=False)
    yield from cut_messages(features, searched, job.max_bin)
    yield from count_messages(listed, searched, job.max_bin, job.n_classes)


def count_messages(listed: Sequence[int], searched: int, max_bin: int, n_columns: int) -> Iterator[Planned]:
    """Yield the sums of a count by bins.

    Args:
        listed: categories of each categorical column.
        searched: how many other columns there are.
        n_columns: classes that are counted, in all parts of the rows.
    """
    bins = [*listed, *([max_bin - 1] * searched)]  # max_bin - 2 cut points lie between the outer bounds
    flags = 2 * n_columns * (1 + sum(len(spans_of(n_bins)) + 1 for n_bins in bins))
    yield Planned(Kind.CELL_FLAGS, 1, 0, wide=False, residues=flags)
    yield Planned(Kind.CLASS_COUNTS, 1, n_columns * sum(n_bins + 1 for n_bins in bins), wide=False)
