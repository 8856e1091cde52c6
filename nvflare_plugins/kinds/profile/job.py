"""What a profile says. Where the data lie and what is allowed, each site's own policy says."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar

from annotated_types import Ge

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import JobDocument
from nvflare_plugins.base.declared import Entries, EntriesOfColumns, Flag, Name, Names, Seconds, Whole, document
from nvflare_plugins.data.labels import OneColumn
from nvflare_plugins.pooled.job import HorizontalJob, ProfileName
from nvflare_plugins.wire.profiles import Profile

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
        """Return a training that looks at the same rows and searches the same cut points; it is never run.

        Its objective takes any label: that labels are classes is for the profile to check.
        """
        return HorizontalJob(
            self.data_set,
            self.label,
            {"objective": "reg:squarederror", "max_bin": self.max_bin, "max_depth": 1},
            num_rounds=1,
            profile=self.profile,
            features=self.features,
            categories=self.categories,
            unknown_category_is_missing=self.unknown_category_is_missing,
            label_classes=self.label_classes,
            min_rows_per_cut=self.min_rows_per_cut,
            tracking=False,
        )
