"""What an alignment job says. Where the data lie, and which column names the rows, each site's own policy says."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Len

from nvflare_plugins.attempt.job_context import JobDocument
from nvflare_plugins.base.checks import expect
from nvflare_plugins.base.declared import Name, Seconds, Words, document

PROFILE = "psi"  # the one way in which this job protects ids; the evidence names it


@document
class AlignmentJob(JobDocument):
    """One alignment of one or more data sets between all sites of the job."""

    KIND: ClassVar[str] = "alignment"
    profile: ClassVar[str] = PROFILE
    tracking: ClassVar[bool] = False

    data_sets: Annotated[list[Name], Len(1), Words("a list of names of data sets, at least one")]
    """Names in every site's policy, such as those of the training and the evaluation set; each is aligned on its own.
    """
    deadline_s: Seconds = 0.0
    """Longest time that an exchange may wait for the slowest site; 0 derives it. However large a set is, a site works
    for a few seconds between two exchanges, and reads its files before the first.
    """

    def __post_init__(self) -> None:
        expect("data_sets names a data set twice", len(set(self.data_sets)) == len(self.data_sets))
