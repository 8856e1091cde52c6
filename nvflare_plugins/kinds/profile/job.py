"""What a profile says, and its plan. Where the data lie and what is allowed, each site's own policy says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Annotated, ClassVar

from annotated_types import Ge

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import JobDocument
from nvflare_plugins.attempt.plan import Plan, PlanRequest
from nvflare_plugins.base.declared import Entries, EntriesOfColumns, Flag, Name, Names, Seconds, Whole, document
from nvflare_plugins.base.formatting import human_bytes, human_seconds
from nvflare_plugins.data.labels import OneColumn
from nvflare_plugins.pooled.job import HorizontalJob, ProfileName, never_run
from nvflare_plugins.pooled.plan import SESSION_EXCHANGES, Planned, cut_messages, message_bytes
from nvflare_plugins.pooled.row_floors import N_COUNTS
from nvflare_plugins.pooled.spans import spans_of
from nvflare_plugins.site.profiles import THREAT_MODELS
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.wire.profiles import Profile, plugin_of

MOST_CLASSES = 64


@document
class ProfileJob(JobDocument):
    """What single features tell of the label, over the rows of all sites: same columns, other rows."""

    KIND: ClassVar[str] = "profile"
    tracking: ClassVar[bool] = False

    data_set: Name
    """Name of the data set in every site's policy."""
    label: OneColumn
    """Label column."""
    profile: ProfileName = Profile.MASKS.value
    """``masks``, ``bfv``, ``ckks``, or ``plain``, which sites refuse unless they consent; or ``plugin.NAME``, a plugin
    that every site's policy names (``plugins``).
    """
    features: Names | None = None
    """Columns to look at; None means all columns of the file but the label."""
    categories: EntriesOfColumns = field(default_factory=dict)
    """Public category list of each categorical column. Where rows are few, neighbours in the list are counted
    together.
    """
    unknown_category_is_missing: Flag = False
    """Treat other categories as missing instead of refusing the data."""
    label_classes: Entries | None = None
    """Public list of label values, at most 64; None means that labels are 0 and 1. With more than two, each class is
    compared with all others.
    """
    max_bin: Annotated[Whole, Ge(3)] = 256
    """Bins per feature whose cut points are searched, as XGBoost's parameter of this name. A later training over the
    same data with equal max_bin and min_rows_per_cut uses the cut points again.
    """
    min_rows_per_cut: Annotated[Whole, Ge(2)] = 10
    """The cut search stops where fewer pooled rows would be singled out, and bins are merged until each holds as many
    pooled rows of every class. At least what every site's policy asks for.
    """
    monotonic: Flag = False
    """Join neighbouring bins of numbers so that the share of the second class rises throughout, or falls, at the
    largest information value: what scorecards want, and optbinning does. For two classes.
    """
    deadline_s: Seconds = 0.0
    """Longest time that an exchange may wait for the slowest site; 0 derives it."""

    def __post_init__(self) -> None:
        if self.label_classes is not None and not 2 <= len(self.label_classes) <= MOST_CLASSES:
            raise ConfigurationError(f"label_classes of a profile must have 2 to {MOST_CLASSES} entries")
        if self.monotonic and self.n_classes != 2:
            raise ConfigurationError("monotonic bins need two classes: with more, no share rises or falls for all")

    @property
    def n_classes(self) -> int:
        """Number of label classes."""
        return 2 if self.label_classes is None else len(self.label_classes)

    def training(self) -> HorizontalJob:
        """Return a training that looks at the same rows and searches the same cut points.

        Its objective takes any label: that labels are classes is for the profile to check.
        """
        params = {"objective": "reg:squarederror", "max_bin": self.max_bin, "max_depth": 1}
        return never_run(self, params, self.features, num_rounds=1)


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
