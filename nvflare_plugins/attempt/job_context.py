"""What every kind of job gives a site to work with, and what a site has kept that an attempt may go on from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, Self

from annotated_types import Ge, Le

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.base.declared import Document, Whole
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.pages.run_record import RoundRow
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.memory.registry import ResumePoint
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_values import is_private
from nvflare_plugins.site.protocols import Span
from nvflare_plugins.workers.workers import Work

# What every kind of job gives a site to work with, and what the site says at the end.


class OnLostSite(Enum):
    """What becomes of a job when a site's process, machine or line is gone."""

    STOP = "stop"
    WAIT = "wait"
    CONTINUE = "continue"


class OnLostParty(Enum):
    """The same for jobs that cannot go on without a site."""

    STOP = OnLostSite.STOP.value
    WAIT = OnLostSite.WAIT.value


class CannotGoOn(JobAborted):
    """An attempt without the lost sites cannot be: the job has to wait for them. Its text says why, and no value."""


LOST_SITE_FIELDS = ("on_lost_site", "lost_site_deadline_s", "most_attempts")
MostAttempts = Annotated[Whole, Ge(1), Le(20)]


class Job(Protocol):
    """What the shell around a job knows of it. Each kind of job has a class of its own."""

    KIND: ClassVar[str]

    @property
    def profile(self) -> str:
        """Return the name of the protection that every private message has."""

    @property
    def tracking(self) -> bool:
        """Return whether metrics of each round are streamed to the server."""

    @property
    def deadline_s(self) -> float:
        """Return the longest time that an exchange may wait for the slowest site; 0 derives it from the job's size."""

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON values."""

    def stated(self, also: Sequence[str] = ()) -> dict[str, Any]:
        """Return it without the fields at their defaults, but with those that are named."""

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Read a job strictly. Raises: ConfigurationError."""


def waiting_s(job: object) -> float | None:
    """Return how long a job waits for a lost site, in seconds; None if a lost site ends it."""
    if getattr(job, "on_lost_site", OnLostSite.STOP.value) == OnLostSite.STOP.value:
        return None
    return float(getattr(job, "lost_site_deadline_s"))  # noqa: B009  (only kinds that can wait have it)


def attempts_of(job: object) -> int:
    """Return how many attempts a job has."""
    return int(getattr(job, "most_attempts", 1))


def goes_on_without(job: object) -> bool:
    """Return whether a job goes on without a site that is lost."""
    return getattr(job, "on_lost_site", OnLostSite.STOP.value) == OnLostSite.CONTINUE.value


def is_paid(job: Job) -> bool:
    """Return whether a job takes from a privacy budget: its profile is private, or its parties add noise to sums."""
    return is_private(job.profile) or bool(getattr(job, "is_noised", False))


class JobDocument(Document):
    """How every kind's job, a class below this one under ``@document``, is written and read.

    Attributes:
        KIND: name of the kind.
        REFUSED: fields that people look for and this kind forbids; name -> why.
        REFUSED_IN: what the refusal calls this kind.
        CANNOT_CONTINUE: why a job of this kind that can wait for a lost site cannot go on without it.
    """

    __slots__ = ()
    WHAT = "the job"
    KIND: ClassVar[str]
    REFUSED: ClassVar[Mapping[str, str]] = {}
    REFUSED_IN: ClassVar[str] = ""
    CANNOT_CONTINUE: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return {each.name: _copied(getattr(self, each.name)) for each in dataclasses.fields(self)}

    def stated(self, also: Sequence[str] = ()) -> dict[str, Any]:
        """Return the job without the fields at their defaults: a release that has further fields states the same.

        Args:
            also: fields that are kept in any case.
        """
        defaults = {each.name: _default(each) for each in dataclasses.fields(self)}
        return {name: value for name, value in self.to_dict().items() if name in also or value != defaults[name]}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Read a job strictly.

        Raises:
            ConfigurationError: a field that is refused, unknown or missing, or a value that is not allowed.
        """
        if not isinstance(document, dict) or not all(isinstance(name, str) for name in document):
            raise ConfigurationError("a job is an object with named fields")
        for name in set(document) & set(cls.REFUSED):
            raise ConfigurationError(f"{name} is refused in {cls.REFUSED_IN}: {cls.REFUSED[name]}")
        cannot_wait = set(document) & set(LOST_SITE_FIELDS) - {field.name for field in dataclasses.fields(cls)}
        if cannot_wait:
            raise ConfigurationError(
                f"{min(cannot_wait)} is refused for this kind of job, which keeps nothing to go on from: a lost site "
                "ends it. Leave it out, and submit the job again after a loss"
            )
        if document.get("forgets") is not None and "forgets" not in {one.name for one in dataclasses.fields(cls)}:
            raise ConfigurationError(
                "forgets is refused for this kind of job: horizontal trainings alone are trained again without persons"
            )
        if cls.CANNOT_CONTINUE and document.get("on_lost_site") == OnLostSite.CONTINUE.value:
            raise ConfigurationError(f"on_lost_site='continue' is refused: {cls.CANNOT_CONTINUE}. Use 'wait'")
        return cls(**document)


def _copied(value: Any) -> Any:
    """Copy a JSON value. Every job is written several times a run, and ``asdict`` copies each number of it deeply."""
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _default(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@dataclass(frozen=True, slots=True)
class SiteContext:
    """Where and with whom a site takes part.

    Attributes:
        runs: folder in which the site keeps its runs.
        attempt: 16 random bytes that the server drew for this attempt.
        number: of the attempt in its job, from 1; a job that waits for lost sites may have several.
        name: of the job, for people; "" where it has none that FLARE would take.
        server_speaks: protocols of this kind of job that the server knows; None where there is no server of FLARE.
        server_pins: SHA-256 of the files of the job's scheme that the server's policy pins; "" of other jobs.
    """

    site: str
    sites: tuple[str, ...]
    job_id: str
    attempt: bytes
    runs: Path
    policy: SitePolicy
    identity: Identity
    number: int = 1
    name: str = ""
    server_speaks: Span | None = None
    server_pins: str = ""


class Progress(Protocol):
    """Tells a person how far a job is. Nothing that is said holds data."""

    def __call__(self, record: RoundRow, n_rounds: int) -> None:
        """Take note of a finished round of ``n_rounds`` in all."""

    def say(self, text: str) -> None:
        """Write one line."""

    def note_workers(self, work: Sequence[Work]) -> None:
        """Take note of what this site's workers do from now on: the values change while they work."""


class Silent:
    """Progress that nobody watches."""

    def __call__(self, record: RoundRow, n_rounds: int) -> None:
        """Take no note."""

    def say(self, text: str) -> None:
        """Write nothing."""

    def note_workers(self, work: Sequence[Work]) -> None:
        """Take no note."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a site's part in a job ended. Holds no data.

    Attributes:
        hmac: hex HMAC under the group key of what all sites agree on at the end, such as the model. The server fails
            the job if the sites' differ; it can neither make one nor test guesses with it.
        message: one line for this site's own log.
        summary: what the server may know; it goes into the job's summary there.
    """

    hmac: str
    message: str
    summary: dict[str, Any] = field(default_factory=dict)


# What a site has kept that an attempt may go on from: earlier attempts of the same job, and the job that it resumes.
#
# A job that waits for a lost site (``on_lost_site``) has one attempt after the other, each with its own session. They
# share the folder of the run: checkpoints and cut points of one attempt are there for the next.


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
        return next((one for one in (self.own, self.resumed) if one is not None and n_done in one.checkpoints()), None)

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
