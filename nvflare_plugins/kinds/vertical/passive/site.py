"""A passive party's part in a vertical job: it answers what the active party asks, and keeps a private table."""

from __future__ import annotations

from he_processors.additive_schemes import Scheme
from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.growth.arithmetic import ARITHMETICS
from nvflare_plugins.kinds.vertical.context import PURPOSE, TrainedPart, VerticalContext
from nvflare_plugins.kinds.vertical.guards import Guard, TreeLimits, bins_section
from nvflare_plugins.kinds.vertical.job import VerticalJob, VerticalProfile
from nvflare_plugins.kinds.vertical.model.model_files import PassivePart
from nvflare_plugins.kinds.vertical.model.routing import PrivateTable, table_from_json, table_to_json
from nvflare_plugins.kinds.vertical.noised import NoisedGuard, NoiseSource
from nvflare_plugins.kinds.vertical.party_data import PartyData, PartySet
from nvflare_plugins.kinds.vertical.passive.party import PassiveParty
from nvflare_plugins.kinds.vertical.protocol.encrypted_scheme import CLEAR_CODE, histogram_maker, unpack_public_key
from nvflare_plugins.kinds.vertical.protocol.gradient_scheme import HistogramAggregator
from nvflare_plugins.kinds.vertical.protocol.messages import Answer, DecisionRequest, Request, TrainingSetup
from nvflare_plugins.kinds.vertical.protocol.requests import Responder, answer_bytes
from nvflare_plugins.kinds.vertical.shards.passive import ShardedHistogramMaker
from nvflare_plugins.pages.run_record import ReportSection, RoundRow
from nvflare_plugins.site.memory.budgets import PredictionBudget
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.xgb.parameters import TrainingParameters

_SCHEMES = {
    VerticalProfile.PAILLIER.value: Scheme.PAILLIER.value,
    VerticalProfile.ELGAMAL.value: Scheme.ELGAMAL.value,
    VerticalProfile.PLAIN.value: CLEAR_CODE,
}


def open_guard(job: VerticalJob, policy: SitePolicy, data: PartyData, parameters: TrainingParameters) -> Guard:
    """Check whether this party would answer for its rows, and return their guard; nothing is charged yet.

    Raises:
        PolicyRefusal: randomised buckets of rows were sent, whose exact bits must stay; or this site has answered for
            rows of the evaluation set as often as it does.
        ConfigurationError: what this site remembers is damaged.
    """
    for one in data.sets:
        SentRows(policy).refuse(None if one.ids is None else one.row_ids())
    for one in predicted_sets(data):
        _budget(policy, one).check(one.row_ids())
    kind = NoisedGuard if job.is_noised else Guard
    guard = kind.open(
        policy.vertical,
        Memory.open(policy),
        data.train.data_set.name,
        data.train.row_ids(),
        row_fraction=float(parameters.effective["subsample"]),
        enforce=job.may_withhold,
        sums_per_set=job.sums_per_set,
    )
    for number, one in enumerate(data.sets):
        if number and one.data_set.name == data.train.data_set.name:
            guard.count_answers_about(number, one.row_ids())
    return guard


def _budget(policy: SitePolicy, one: PartySet) -> PredictionBudget:
    return PredictionBudget(policy, one.data_set.name, in_training=True)


def predicted_sets(data: PartyData) -> list[PartySet]:
    """Return the sets whose rows are charged: they go down every tree, as in a prediction.

    Bits of the training set's rows, and of others of the same table, are counted with those of its splits.
    """
    return [one for one in data.sets[1:] if one.data_set.name != data.train.data_set.name]


class PassiveSite:
    """Answers requests until the active party ends the training.

    Privacy: see ``PassiveParty``; neither label, gradient, leaf nor foreign threshold reaches this process in the
        clear, unless the job's profile is ``plain``.
    """

    def __init__(self, start: VerticalContext):
        """Args: start: after all sites have allowed the rows, with this one's guard (``open_guard``)."""
        if start.guard is None:
            raise ValueError("a passive party needs its guard")
        if (start.noised is None) != (start.payment is None):
            raise ValueError("noised sums need their payment, and nothing else has one")
        self._start = start
        self._party: PassiveParty | None = None
        self._guard = start.guard
        self._n_rounds = start.n_done
        self._table = self._first_table()
        self._uncharged = predicted_sets(start.data)

    def run(self) -> TrainedPart:
        """Take part; return this party's part."""
        start = self._start
        start.enter_round(start.n_done)
        most_categories = max(map(len, start.data.categories), default=0)
        longest = start.sizes.longest_question(len(start.data.columns), len(self._table), most_categories)
        Responder(
            start.attempt.channel,
            start.attempt.session,
            PURPOSE,
            start.pace(longest),
            start.transport.abort,
            start.active_rank,
            lambda data: answer_bytes(data, start.job.active, self._answer, start.notes),
            self._turned,
            start.n_done,
            lambda: self._party is not None and self._party.prepare(),
        ).run()
        if self._party is None:
            raise ProtocolError("the active party ended the training before it began")
        categories = dict(start.data.train.table.categories)
        part = PassivePart(dict(self._party.table), start.data.columns, start.data.aliases, categories)
        return TrainedPart(part, self._n_rounds, start.parameters.agreed, self._sections())

    def _first_table(self) -> PrivateTable:
        start = self._start
        if start.checkpoint is None:
            return {} if start.initial is None else dict(start.initial.part.table)
        table, aliases = table_from_json(start.checkpoint.content)
        if aliases != start.data.aliases:
            raise ConfigurationError("the checkpoint is of other features, or under other aliases, than the job has")
        return table

    def _answer(self, request: Request) -> Answer | None:
        if isinstance(request, TrainingSetup):
            return self._begin(request)
        if self._party is None:
            raise ProtocolError("the active party asks before it has announced its key")
        if isinstance(request, DecisionRequest) and request.data_set > 0:
            self._charge_predictions()
        return self._party.answer(request)

    def _charge_predictions(self) -> None:
        """Charge the rows of the evaluation set, durably, before the first answer about them. Raises: PolicyRefusal."""
        for one in self._uncharged:
            _budget(self._start.context.policy, one).charge(one.row_ids())
        self._uncharged = []

    def _begin(self, setup: TrainingSetup) -> Answer:
        start, job = self._start, self._start.job
        if self._party is not None:
            raise ProtocolError("the active party announced a key twice")
        if setup.scheme != _SCHEMES[job.profile]:
            raise ProtocolError("the active party announced another scheme than the job's")
        if job.key_length is not None:
            found = unpack_public_key(setup.scheme, setup.public_key)
            if found.key_bits < job.key_length:
                raise ProtocolError("the active party announced a shorter key than the job's")
        due = job.fraction_bits if job.profile == VerticalProfile.ELGAMAL.value else None
        if start.noised is not None:  # noise counts steps of this very format: beside a finer one it would be nothing
            due = start.noised.fraction_bits
        if due is not None and setup.fraction_bits != due:
            raise ProtocolError("the active party announced another number of fraction bits than the job's")
        n_rows, workers, timer = start.data.train.table.n_rows, start.workers, start.stages.measure
        backend, allow_clear = start.context.policy.arithmetic, not job.is_encrypted
        maker: HistogramAggregator
        tails = (0, 0) if start.noised is None else start.noised.tails
        if workers is None:
            maker = histogram_maker(setup, n_rows, allow_clear=allow_clear, backend=backend, timer=timer, tails=tails)
        else:
            maker = ShardedHistogramMaker(
                setup, n_rows, workers, allow_clear=allow_clear, backend=backend, timer=timer, tails=tails
            )
        payment = start.payment
        self._party = PassiveParty(
            start.data.features(),
            start.data.aliases,
            start.parameters.max_bin,
            maker,
            self._table,
            self._guard,
            most_trees=start.most_trees,
            limits=TreeLimits.from_effective(start.parameters.effective),
            categories=start.data.categories,
            cuts=None if payment is None else payment.cut_points(start.data.train),
            noise=None if payment is None else NoiseSource(payment.noise, payment.pay_tree),
            arithmetic=ARITHMETICS[start.arithmetic],
        )
        start.progress.say(f"answering {job.active} about {len(start.data.columns)} columns")
        start.stages.take()
        return self._party.schema()

    def _turned(self, number: int) -> None:
        """Note that the active party has finished a round; nothing of the next one has been worked on."""
        start = self._start
        times = start.stages.take()
        seconds, stages = times.seconds, times.stages
        stages.pop("prepare", None)  # while it waits
        stages["network"] = max(seconds - sum(stages.values()), 0.0)  # and waiting for the others
        self._n_rounds = number + 1
        if start.is_checkpoint(self._n_rounds) and self._party is not None:
            start.keep(self._n_rounds, table_to_json(self._party.table, start.data.aliases))
        row = RoundRow(number, seconds, {}, stages, times.spans)
        start.round_done(row)
        start.progress(row, start.job.num_rounds)

    def _sections(self) -> tuple[ReportSection, ...]:
        start, found = self._start, self._guard.exposure()
        features = ReportSection(
            "This party's features",
            columns=("column", "alias"),
            rows=tuple(zip(start.data.columns, start.data.aliases, strict=True)),
        )
        bins = bins_section(found, start.job.preset, start.job.sums_per_set)
        return (features, bins) if start.payment is None else (features, start.payment.section(), bins)
