"""What both kinds of parties have at hand once a vertical job may send private bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nvflare_plugins.attempt.job_context import Progress, SiteContext, waiting_s
from nvflare_plugins.attempt.reservations import Reservations
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.cluster.workers import Workers
from nvflare_plugins.report.run_record import ReportSection, RoundRow
from nvflare_plugins.vertical.checkpoints import Checkpoint
from nvflare_plugins.vertical.guards.guards import Guard
from nvflare_plugins.vertical.guards.tree_limits import TreeLimits
from nvflare_plugins.vertical.job import VerticalJob
from nvflare_plugins.vertical.message_sizes import MessageSizes
from nvflare_plugins.vertical.model.model_files import Part, StoredPart
from nvflare_plugins.vertical.noised.payment import NoisePayment
from nvflare_plugins.vertical.noised.plan import NoisePlan, plan_of, trees_due, trees_per_round
from nvflare_plugins.vertical.party_data import PartyData
from nvflare_plugins.vertical.protocol.conversation import FlowControl
from nvflare_plugins.vertical.protocol.party_client import ContentRecorder
from nvflare_plugins.vertical.timing import Stages
from nvflare_plugins.wire.catalogue import Phase, TrainingStep
from nvflare_plugins.wire.channel import Transport
from nvflare_plugins.xgb.parameters import TrainingParameters

PURPOSE = "vertical training"
EXCHANGE_S = 600.0
ANSWER_S = 3600.0


@dataclass(frozen=True, slots=True, repr=False)
class VerticalContext:
    """Where one attempt starts.

    Attributes:
        data: this party's columns of the rows that all parties share.
        parameters: checked without constraints, which name columns of other parties.
        n_done: rounds of the job that a checkpoint holds already; 0 for a fresh start.
        checkpoint: this party's part after those rounds.
        initial: this party's part of a model to continue.
        guard: of a passive party, opened before any party went on.
        workers: of this party's own cluster; None is this process.
        arithmetic: name of that of the trees, which all parties agreed on.
        payment: of a passive party in the preset noised, with all that the job may cost reserved.
    """

    attempt: SiteAttempt
    data: PartyData
    parameters: TrainingParameters
    reservations: Reservations
    notes: ContentRecorder
    arithmetic: str
    n_done: int = 0
    checkpoint: Checkpoint | None = None
    initial: StoredPart[Any] | None = None
    guard: Guard | None = None
    workers: Workers | None = None
    payment: NoisePayment | None = None
    stages: Stages = field(default_factory=Stages)

    @property
    def job(self) -> VerticalJob:
        """Return the job."""
        job: VerticalJob = self.attempt.job
        return job

    @property
    def context(self) -> SiteContext:
        """Return where and with whom this party takes part."""
        return self.attempt.context

    @property
    def progress(self) -> Progress:
        """Return who is told how far the job is."""
        return self.attempt.progress

    @property
    def transport(self) -> Transport:
        """Return the way to the server."""
        return self.attempt.transport

    @property
    def active_rank(self) -> int:
        """Return the rank of the active party."""
        return self.attempt.channel.sites.index(self.job.active)

    @property
    def trees_per_round(self) -> int:
        """Return the trees of one boosting round."""
        return trees_per_round(self.parameters)

    def pace(self, message_bytes: int) -> FlowControl:
        """Return the pace of the conversation, the same at all parties but for the longest message that may come."""
        pace = FlowControl.within(self.job.deadline_s or EXCHANGE_S)
        return replace(pace, message_bytes=message_bytes, idle_s=self.answer_s)

    @property
    def sizes(self) -> MessageSizes:
        """Return what decides how long messages get."""
        rows = [one.table.n_rows for one in self.data.sets]
        limits = TreeLimits.from_effective(self.parameters.effective)
        return MessageSizes.of(self.job, rows, self.trees_per_round, limits, self.noised)

    @property
    def most_trees(self) -> int:
        """Return the trees that passive parties may be asked about in this attempt."""
        if self.noised is not None:
            return trees_due(self.job, self.parameters, self.n_done)
        return (self.job.num_rounds - self.n_done) * self.trees_per_round

    @property
    def noised(self) -> NoisePlan | None:
        """Return the plan of a job in the preset noised."""
        return plan_of(self.job, self.parameters)

    @property
    def answer_s(self) -> float:
        """Return how long the active party waits for one answer, and the others for its next question."""
        return self.job.deadline_s or ANSWER_S

    def enter_round(self, number: int) -> None:
        """Let the next exchanges belong to a round of the job; all parties do it at the same step."""
        self.attempt.channel.moment = TrainingStep(Phase.UPDATE, number)

    def round_done(self, row: RoundRow) -> None:
        """Note a finished round at the step at which all parties do."""
        self.notes.has_told = True  # its metrics
        self.attempt.round_done(row)
        self.enter_round(row.round + 1)

    def is_checkpoint(self, n_rounds: int) -> bool:
        """Tell whether a checkpoint is due after so many rounds of the job."""
        every = self.job.checkpoint_every if waiting_s(self.job) is None else 1
        return every > 0 and n_rounds % every == 0

    def keep(self, n_rounds: int, content: str) -> None:
        """Write a checkpoint; the registry first: it lets a lost job resume from no later round than it knows of."""
        self.notes.has_told = True
        self.reservations.trees_complete(n_rounds)
        tag = self.attempt.session.hmac(f"checkpoint after {n_rounds} rounds", b"").hex()
        Checkpoint(n_rounds, tag, content).write(self.attempt.folder)


@dataclass(frozen=True, slots=True, repr=False)
class TrainedPart:
    """How training ended at one party.

    Attributes:
        n_rounds: rounds of the job, those before a resumption included.
        params: XGBoost parameters in effect, for the report.
        best_round: of early stopping, counted as the job's rounds are.
    """

    part: Part
    n_rounds: int
    params: Mapping[str, object]
    sections: tuple[ReportSection, ...] = ()
    best_round: int | None = None
