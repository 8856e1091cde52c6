"""The active party's part in a vertical job: key, conversation, the trees that it grows."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.base.formatting import counted
from nvflare_plugins.data.table import is_plain_text
from nvflare_plugins.growth.sampling import with_own_seed
from nvflare_plugins.growth.training import GrownModel
from nvflare_plugins.kinds.vertical.active.key_owner import PrecomputingKeyOwner, open_owner
from nvflare_plugins.kinds.vertical.active.training import (
    LabelledSet,
    OwnColumns,
    VerticalResult,
    VerticalRound,
    VerticalSettings,
    all_columns,
    purity_report,
    train_vertical,
)
from nvflare_plugins.kinds.vertical.context import PURPOSE, TimedOwner, TrainedPart, VerticalContext
from nvflare_plugins.kinds.vertical.job import check_vertical_parameters
from nvflare_plugins.kinds.vertical.message_sizes import INTRODUCTION_BYTES
from nvflare_plugins.kinds.vertical.model.model import structures
from nvflare_plugins.kinds.vertical.model.model_files import ActivePart, PartyColumns
from nvflare_plugins.kinds.vertical.protocol.conversation import Party, collect, place_parties
from nvflare_plugins.kinds.vertical.protocol.gradient_scheme import ClearGradientOwner, GradientOwner, StockedOwner
from nvflare_plugins.kinds.vertical.protocol.messages import PartySchema, TrainingSetup
from nvflare_plugins.kinds.vertical.protocol.requests import ConversationLink, Requester
from nvflare_plugins.pages.run_record import ReportSection, RoundRow
from nvflare_plugins.xgb.continuation import check_initial_model
from nvflare_plugins.xgb.model_json import check_lists, check_names_survive
from nvflare_plugins.xgb.parameters import TrainingParameters


class ActiveSite:
    """Trains with the passive parties.

    Security: label, gradients, secret key and leaves stay in this process.
    """

    def __init__(self, start: VerticalContext):
        self._start = start
        initial = start.initial.part if start.initial is not None else None
        self._n_initial = 0 if initial is None else len(structures(initial.booster)) // start.trees_per_round
        self._model = None if initial is None else initial.booster
        if start.checkpoint is not None:
            self._model = start.checkpoint.content.encode()
        self._rows: dict[int, RoundRow] = {}
        table = start.data.train.table
        self._own = OwnColumns(start.data.columns, dict(table.categories), start.job.label_classes)

    def run(self) -> TrainedPart:
        """Train; return this party's part."""
        start, job = self._start, self._start.job
        start.enter_round(start.n_done)
        with Requester(
            start.attempt.channel,
            start.attempt.session,
            PURPOSE,
            start.pace(INTRODUCTION_BYTES),
            start.transport.abort,
            on_turn=lambda turn: start.round_done(self._rows[turn]),
            first_turn=start.n_done,
            timer=lambda: start.stages.measure("network"),
        ) as asking:
            self._asking: Requester = asking
            # Within the conversation, which shows the others that this site is alive.
            n_rows, backend = start.data.train.table.n_rows, start.context.policy.arithmetic
            owner, setup = open_owner(job, n_rows, backend, start.stages.measure, start.workers, start.noised)
            start.progress.say(self._scheme_line())
            parties = self._introduce(setup)
            params = self._checked_parameters(parties)
            start.stages.take()
            with self._stocked(owner) as stocked:
                result = train_vertical(
                    params,
                    self._sets(),
                    parties,
                    TimedOwner(stocked, start.stages),
                    self._own,
                    self._settings(),
                    self._model,
                    self._after_round,
                )
        columns = tuple(PartyColumns(party.name, party.schema.aliases) for party in parties)
        part = ActivePart(result.model, start.data.columns, columns, result.best_round)
        best = None if result.best_round is None else result.best_round - self._n_initial
        n_rounds = start.n_done + len(result.rounds)
        return TrainedPart(part, n_rounds, params.agreed, self._sections(result, parties), best)

    # -- before training ----------------------------------------------------------------------------------------------

    def _scheme_line(self) -> str:
        job = self._start.job
        if not job.is_encrypted:
            return "gradients go to the passive parties in the clear, as the job and all policies say"
        if job.key_length is None:
            loss = "" if job.is_exact else "; gradients are rounded to 14 bits: not the centralized model"
            return f"made an {job.profile} key of 128-bit strength for this job{loss}"
        return f"made a {job.profile} key of {job.key_length} bits for this job"

    def _introduce(self, setup: TrainingSetup) -> tuple[Party, ...]:
        """Announce the scheme; get every passive party's schema."""
        start, job, notes = self._start, self._start.job, self._start.notes
        ranks = [rank for rank in range(start.attempt.channel.world) if rank != start.active_rank]
        names = [start.attempt.channel.sites[rank] for rank in ranks]
        links = [ConversationLink(self._asking, rank, name, notes) for rank, name in zip(ranks, names, strict=True)]
        unknown = PartySchema((1,), (1,), ("f0",))
        parties = place_parties(0, [(name, unknown, link) for name, link in zip(names, links, strict=True)])
        asked = [link.ask(setup) for link in links]
        schemas = [
            collect(party, future, PartySchema, start.answer_s) for party, future in zip(parties, asked, strict=True)
        ]
        for name, schema in zip(names, schemas, strict=True):
            if not all(is_plain_text(alias) and not set(alias) & set("[]<") for alias in schema.aliases):
                raise ProtocolError(f"{name} calls a feature by a name that no model can hold")
            listed = [tuple(map(str, words)) for words in job.categories.get(name, {}).values()]
            if sorted(listed) != sorted(words for words in schema.categories if words):
                raise ProtocolError(f"{name} has other lists of categories than the job")
        sizes, n_earlier = start.sizes, len(structures(self._model)) if self._model else 0
        for rank, schema in zip(ranks, schemas, strict=True):
            self._asking.expect(rank, sizes.longest_answer(schema.n_bins, n_earlier))
        introductions = list(zip(names, schemas, links, strict=True))
        parties = place_parties(len(start.data.columns), introductions)
        shown = ", ".join(f"{len(party.schema.aliases)} of {party.name}" for party in parties)
        start.progress.say(f"columns: {len(start.data.columns)} here, {shown}")
        return parties

    def _columns(self, parties: tuple[Party, ...]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
        names, categories = all_columns(self._own, parties)
        if len(set(names)) != len(names):
            raise ConfigurationError("a column here has the name under which the model lists another party's")
        check_names_survive(names, categories)
        return names, categories

    def _checked_parameters(self, parties: tuple[Party, ...]) -> TrainingParameters:
        """Check the parameters with all parties' columns, and that the model to continue is one of this job."""
        start, (names, categories) = self._start, self._columns(parties)
        params = with_own_seed(check_vertical_parameters(start.job.params, names))
        if start.initial is not None:
            part = start.initial.part
            if [(p.site, p.aliases) for p in part.parties] != [(p.name, p.schema.aliases) for p in parties]:
                raise ConfigurationError("the model to continue was trained with other parties, or other features")
            check_initial_model(part.booster, str(start.job.initial_model), params, names)
            check_lists(part.booster, str(start.job.initial_model), categories, start.job.label_classes)
        return params

    def _sets(self) -> list[LabelledSet]:
        return [
            LabelledSet(one.name, one.table.held_features(), one.table.label, one.table.weight)
            for one in self._start.data.sets
        ]

    def _stocked(self, owner: StockedOwner | ClearGradientOwner) -> AbstractContextManager[GradientOwner]:
        start, job = self._start, self._start.job
        if isinstance(owner, ClearGradientOwner):
            return nullcontext(owner)
        n_trees = max(job.num_rounds - max(start.n_done, job.own_rounds), 0) * start.trees_per_round
        return PrecomputingKeyOwner(owner, start.data.train.table.n_rows, n_trees, start.stages.measure)

    def _settings(self) -> VerticalSettings:
        start, job = self._start, self._start.job
        return VerticalSettings(
            num_rounds=job.num_rounds - self._start.n_done,
            early_stopping_rounds=job.early_stopping_rounds,
            evaluate_training=job.evaluate_training,
            own_rounds=self._n_initial + job.own_rounds if job.own_rounds else 0,
            guarded=job.may_withhold,
            noised=start.noised,
            is_resumed=self._start.checkpoint is not None,
            deadline_s=self._start.answer_s,
            arithmetic=self._start.arithmetic,
        )

    # -- while training -----------------------------------------------------------------------------------------------

    def _after_round(self, record: VerticalRound, model: GrownModel) -> None:
        start = self._start
        number = record.round - self._n_initial  # the job's rounds, without those of the model it continues
        times = start.stages.take()
        stages = times.stages
        stages.pop("prepare", None)  # beside the others
        known = sum(stages.get(stage, 0.0) for stage in ("encrypt", "decrypt", "network"))
        if "search" in stages:  # within "decrypt", and listed beside it
            stages["decrypt"] = max(stages["decrypt"] - stages["search"], 0.0)
        stages["grow"] = max(record.seconds - known, 0.0)
        row = self._rows[number] = RoundRow(number, record.seconds, record.metrics, stages, times.spans)
        self._asking.turn(number + 1)  # before the checkpoint: the passive parties are then two behind at most
        if start.is_checkpoint(number + 1):
            start.keep(number + 1, model.to_bytes().decode())
        start.progress(row, start.job.num_rounds)

    # -- after training -----------------------------------------------------------------------------------------------

    def _sections(self, result: VerticalResult, parties: tuple[Party, ...]) -> tuple[ReportSection, ...]:
        start = self._start
        rows = [(start.context.site, "active", str(len(start.data.columns)), ", ".join(start.data.columns))]
        rows += [(p.name, "passive", str(len(p.schema.aliases)), ", ".join(p.schema.aliases)) for p in parties]
        sections = [
            ReportSection("Parties", columns=("party", "role", "features", "names or aliases"), rows=tuple(rows))
        ]
        if result.leaf_purities:
            label = start.data.train.table.label
            own = max(start.job.own_rounds - start.n_done, 0)
            report = purity_report(result.leaf_purities, start.trees_per_round, own, label)
            text = (
                "How often a passive party that knows which rows share a leaf would guess their label, had it been "
                f"told each leaf's most frequent one. {counted(report.own_rounds, 'round')} used this party's columns "
                "alone."
            )
            sections.append(ReportSection("Leaf purity", (text,), ("trees", "purity"), report.rows()))
        return tuple(sections)
