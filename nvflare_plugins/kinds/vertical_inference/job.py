"""What a job with a finished vertical model says. Where parts and data lie, each site's own policy and runs say."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from nvflare_plugins.attempt.job_context import JobDocument, MostAttempts, OnLostParty
from nvflare_plugins.base.checks import expect
from nvflare_plugins.base.declared import Flag, JobId, Name, OneOf, Range, Seconds, Whole, Words, document
from nvflare_plugins.kinds.vertical.job import AlignmentId

PROFILE = "vertical_model"  # the one way in which such a job protects its messages; the evidence names it
BATCH_ROWS = 20_000
_MAX_BATCH_ROWS = 1 << 20
_MAX_EVIDENCE_MIB = 960  # what the server takes at the end has a bound of its own
_ROUNDS = Words("all, best, or two numbers, [first, end)")


class Action(Enum):
    """What to do with the model."""

    PREDICT = "predict"
    EXPLAIN = "explain"
    MERGE = "merge"
    SERVE = "serve"


class FileFormat(Enum):
    """Form of the file with predictions or explanations."""

    PARQUET = "parquet"
    CSV = "csv"


@document
class InferenceJob(JobDocument):
    """One use of a vertical model by all of its parties. Results are at the active party alone."""

    KIND: ClassVar[str] = "vertical_inference"
    CANNOT_CONTINUE: ClassVar[str] = "no other party has the columns of one that is lost"
    profile: ClassVar[str] = PROFILE
    tracking: ClassVar[bool] = False

    model: Annotated[JobId, Words("the id of the job that trained it")]
    """Id of the job that trained the model. Every site reads its part from that job's run folder, or from
    ``<id>.<site>.json`` in its input folder.
    """
    action: Annotated[str, OneOf(Action)] = Action.PREDICT.value
    """``predict``; ``explain`` (SHAP values; every passive party's policy must consent to ``explain``); ``merge`` (one
    ordinary XGBoost model; every passive party must consent to ``merge_model``); or ``serve`` (the job stays and scores
    rows as they are asked for at the active party; every passive party must consent to ``scoring``).
    """
    data_set: Name | None = None
    """Name in every site's policy of the rows to predict or explain."""
    rows: Range | None = None
    """[first, end): positions in the aligned set; None takes all of it."""
    unknown_category_is_missing: Flag = False
    """Treat categories outside the model's public lists as missing instead of refusing the data."""
    rounds: Annotated[Annotated[str, OneOf("all", "best")] | Range, _ROUNDS] = "all"
    """``all``, ``best`` (up to the best round of early stopping), or [first, end) boosting rounds."""
    alignment: AlignmentId | None = None
    """``first`` finds the common rows by private set intersection; the id of a finished job of the same sites takes
    those that it found (a training job that aligned this data set will do; a set is aligned only once); None means that
    the files of all sites hold the same rows in the same order.
    """
    file_format: Annotated[str, OneOf(FileFormat)] = FileFormat.PARQUET.value
    """``parquet`` or ``csv``."""
    batch_rows: Annotated[Whole, Ge(1), Le(_MAX_BATCH_ROWS)] = BATCH_ROWS
    """Rows that are on their way at the same time; the result does not depend on it. With ``serve`` also the most rows
    of one request.
    """
    serve_s: Seconds = 86400.0
    """With ``serve``: how long the job stays, in seconds; 0 sets no limit. It counts from the start of an attempt: anew
    after a lost site is back.
    """
    idle_s: Seconds = 0.0
    """With ``serve``: the job ends when nobody has asked for so many seconds; 0 sets no limit."""
    evidence_mib: Annotated[Whole, Ge(1), Le(_MAX_EVIDENCE_MIB)] = 256
    """With ``serve``: the job ends when the active party's evidence has this size in MiB."""
    on_lost_site: Annotated[str, OneOf(OnLostParty)] = OnLostParty.STOP.value
    """With ``serve``, when a site is lost: ``stop`` ends the job; ``wait`` pauses it up to ``lost_site_deadline_s``
    and, when the site is back, goes on in the same job with a new handshake, with the alignment that was in use.
    """
    lost_site_deadline_s: Seconds = 600.0
    """How long ``on_lost_site="wait"`` waits for a lost site, each time."""
    most_attempts: MostAttempts = 20
    """Attempts of a job that waits; each try after a loss, or after what time mends, is one."""
    deadline_s: Seconds = 0.0
    """Longest time that an exchange may wait for the slowest site; 0 derives it."""

    def __post_init__(self) -> None:
        if self.action == Action.MERGE.value:
            unused = [name for name in ("data_set", "rows", "alignment") if getattr(self, name) is not None]
            expect(f"merging needs no {', '.join(unused)}", not unused)
            expect("a merged model has all rounds", self.rounds == "all")
        else:
            expect(f"{self.action} needs a data_set", self.data_set is not None)
        if self.action == Action.SERVE.value:
            expect("a job that stays takes all rows: leave rows out", self.rows is None)
        else:
            expect("on_lost_site is for action='serve': leave it out", self.on_lost_site == OnLostParty.STOP.value)
