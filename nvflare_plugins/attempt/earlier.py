"""What a site has kept that an attempt may go on from: earlier attempts of the same job, and the job that it resumes.

A job that waits for a lost site (``on_lost_site``) has one attempt after the other, each with its own session. They
share the folder of the run: checkpoints and cut points of one attempt are there for the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.site.memory.registry import ResumePoint


@dataclass(frozen=True, slots=True)
class Earlier:
    """The runs that an attempt may go on from.

    Attributes:
        resumed: the job that this one resumes, if it does.
        own: earlier attempts of this job, if there were any.
    """

    resumed: RunFolder | None = None
    own: RunFolder | None = None

    @classmethod
    def of(cls, context: SiteContext, resume_from: str | None) -> Earlier:
        """Return what there is for an attempt of a job. Raises: ConfigurationError, if an id is none."""
        resumed = None if resume_from is None else RunFolder(context.runs, resume_from)
        return cls(resumed, RunFolder(context.runs, context.job_id) if context.number > 1 else None)

    def checkpoints(self) -> Mapping[int, Path]:
        """Return the checkpoints by number of finished rounds."""
        found: dict[int, Path] = {}
        for folder in (self.resumed, self.own):
            found |= {} if folder is None else folder.checkpoints()
        return found

    def folder_of(self, n_done: int) -> RunFolder | None:
        """Return the run whose checkpoint holds so many rounds; None if there is none."""
        path = self.checkpoints().get(n_done)
        return next((one for one in (self.own, self.resumed) if one is not None and path in _files(one)), None)

    def point(self, n_done: int) -> ResumePoint | None:
        """Return where the job goes on; None for a fresh start.

        Args:
            n_done: finished rounds of the latest checkpoint that all sites hold.

        Raises:
            ConfigurationError: the job resumes another, and no checkpoint is held by all sites.
        """
        folder = self.folder_of(n_done)
        if folder is not None:
            return ResumePoint(folder.path.name, n_done)
        if self.resumed is not None:
            raise ConfigurationError(f"no checkpoint of {self.resumed.path.name} is held by all sites: start a new job")
        return None


def _files(folder: RunFolder) -> list[Path]:
    return list(folder.checkpoints().values())
