"""What an alignment job says. Where the data lie, and which column names the rows, each site's own policy says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from he_processors.errors import ConfigurationError
from nvflare_plugins.checks import check_fields, seconds

PROFILE = "psi"  # the one way in which this job protects ids; the evidence names it


@dataclass(frozen=True, slots=True)
class AlignmentJob:
    """One alignment of one or more data sets between all sites of the job.

    Attributes:
        data_sets: names in every site's policy, such as those of the training and the evaluation set; each is aligned
            on its own.
        deadline_s: longest time that an exchange may wait for the slowest site; 0 derives it. However large a set is,
            a site works for a few seconds between two exchanges, and reads its files before the first.
    """

    profile: ClassVar[str] = PROFILE
    tracking: ClassVar[bool] = False

    data_sets: list[str] = field(default_factory=list)
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        names = self.data_sets
        if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, str) and n for n in names):
            raise ConfigurationError("data_sets must be a list of names of data sets, at least one")
        if len(set(names)) != len(names):
            raise ConfigurationError("data_sets names a data set twice")
        seconds("deadline_s", self.deadline_s)

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> AlignmentJob:
        """Read a job strictly.

        Raises:
            ConfigurationError: unknown fields, or a value that is not allowed.
        """
        return cls(**check_fields(document, {f.name for f in dataclasses.fields(cls)}))
