"""How often the sites meet for a tree: two exchanges for each level of nodes, where nothing takes long."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nvflare_plugins.growth.tree import MAX_BATCH
from nvflare_plugins.kinds.vertical import context
from nvflare_plugins.kinds.vertical.active_party import LabelledSet, OwnColumns, VerticalSettings, VerticalTraining
from nvflare_plugins.kinds.vertical.context import MessageSizes
from nvflare_plugins.kinds.vertical.conversation import FlowControl, Requester, Responder
from nvflare_plugins.kinds.vertical.guards import TreeLimits
from nvflare_plugins.kinds.vertical.job import VerticalJob, check_vertical_parameters
from nvflare_plugins.kinds.vertical.key_owner import ClearGradientOwner, pair_format
from nvflare_plugins.kinds.vertical.messages import ConversationLink, PartySchema, answer_bytes, place_parties, to_bytes
from nvflare_plugins.kinds.vertical.passive_party import PassiveParty
from tests.support.clear_maker import ClearHistogramMaker
from tests.support.conversations import Site, converse, end_of
from tests.support.vertical_federation import Joined, federate

DEADLINE_S = 60.0
# Nobody is impatient: a step is taken when it is due, and never because of a busy machine.
PACE = dataclasses.replace(FlowControl(), patience_s=DEADLINE_S, linger_s=DEADLINE_S, message_bytes=1 << 24)
ROUNDS = 4


class Silent:
    """Takes note of nothing."""

    def sent(self, peer, message, size) -> None: ...

    def received(self, peer, message, size) -> None: ...


def exchanges(n_passive: int, depth: int) -> list[int]:
    """Return how many exchanges each round took."""
    rng = np.random.default_rng(4)
    widths = [2, *[3] * n_passive]
    features = rng.normal(size=(600, sum(widths))).astype(np.float32)
    label = (features @ rng.normal(size=sum(widths)) + rng.normal(size=600) > 0).astype(np.float32)
    parts = np.split(features, np.cumsum(widths)[:-1], axis=1)
    parties = [PassiveParty([p.T], ["a", "b", "c"], 16, ClearHistogramMaker()) for p in parts[1:]]
    meetings: list[int] = []

    def lead(site: Site) -> None:
        def turned(turn: int) -> None:
            turns.append(site.channel.counter)

        turns: list[int] = []
        with Requester(end_of(site, PACE), turned) as asking:
            links = [ConversationLink(asking, i + 1, f"site-{i + 2}", Silent()) for i in range(n_passive)]
            named = [
                (f"site-{i + 2}", p.schema(), link) for i, (p, link) in enumerate(zip(parties, links, strict=True))
            ]
            params = {"objective": "binary:logistic", "max_depth": depth, "max_bin": 16, "min_child_weight": 0}
            turns.append(site.channel.counter)
            training = VerticalTraining(
                check_vertical_parameters(params, [f"x{i}" for i in range(sum(widths))]),
                [LabelledSet("train", np.ascontiguousarray(parts[0]), label)],
                place_parties(2, named),
                ClearGradientOwner(pair_format(600)),
                OwnColumns(("x0", "x1")),
                VerticalSettings(ROUNDS, deadline_s=DEADLINE_S),
            )
            training.run(lambda record, booster: asking.turn(record.round + 1))
        meetings.extend(np.diff(turns).tolist())

    def answering(party: PassiveParty):
        def task(site: Site) -> None:
            def answer(question: bytes) -> bytes:
                return answer_bytes(question, "site-1", party.answer, Silent())

            Responder(end_of(site, PACE), 0, answer).run()

        return task

    results = converse([lead, *map(answering, parties)])
    assert results == [None] * (1 + n_passive)
    assert all(party.table for party in parties)
    return meetings


@pytest.mark.parametrize("depth", [2, 4])
def test_with_one_passive_party_a_level_takes_two_exchanges(depth):
    found = exchanges(1, depth)
    # A tree of this depth has one more level of nodes than its depth: the root's sums are asked for with its gradients,
    # and the last level is only divided. A turn's step carries the next tree's gradients, but for the last one.
    assert len(found) == ROUNDS and sum(found) <= ROUNDS * 2 * (depth + 1) + 1


def test_with_more_passive_parties_what_one_decides_has_to_reach_the_others():
    assert sum(exchanges(2, 3)) <= ROUNDS * 4 * 4


# -- sizes of messages -------------------------------------------------------------------------------------------------


DEEP = TreeLimits(12, 0)


def job(**changes: object) -> VerticalJob:
    return VerticalJob.from_dict({"active": "site-1", "data_set": "d", "label": "y", **changes})


@pytest.mark.parametrize(
    ("params", "limits"),
    [
        ({"max_depth": 12, "min_child_weight": 0}, DEEP),
        ({"max_depth": 2}, TreeLimits(2, 0)),
        ({"grow_policy": "lossguide", "max_depth": 0, "max_leaves": 40}, TreeLimits(0, 40)),
        ({"num_parallel_tree": 5, "max_depth": 4}, TreeLimits(4, 0)),
    ],
    ids=str,
)
def test_all_messages_of_a_training_fit(monkeypatch, params, limits):
    """Without the allowance for headers, which would hide a bound that is too small in tests."""
    monkeypatch.setattr(context, "_FIELDS_BYTES", 256)
    rng = np.random.default_rng(0)
    features = rng.normal(size=(900, 4)).astype(np.float32)
    label = (features[:, 0] * features[:, 2] + rng.normal(size=900) > 0).astype(np.float32)
    joined = Joined(features, label, (2, 2), (features[:600], label[:600]))
    questions, answers = [], []
    honest = PassiveParty.answer

    def listen(self, request):
        answer = honest(self, request)
        questions.append(len(to_bytes(request)))
        if answer is not None and not isinstance(answer, PartySchema):
            answers.append(len(to_bytes(answer)))
        return answer

    monkeypatch.setattr(PassiveParty, "answer", listen)
    base = {"objective": "binary:logistic", "max_bin": 64, "eval_metric": "logloss"}
    first = federate(joined, {**base, **params}, 1)
    outcome = federate(joined, {**base, **params}, 1, initial=first)
    sizes = MessageSizes.of(job(profile="plain"), (900, 600), params.get("num_parallel_tree", 1), limits)
    n_bins = outcome.parties[0].schema.n_bins
    n_trees = params.get("num_parallel_tree", 1)
    assert questions and max(questions) <= sizes.longest_question(2, len(first.passives[0].table))
    assert answers and max(answers) <= sizes.longest_answer(n_bins, n_trees)


def test_bounds_are_those_of_the_job_and_not_of_all_jobs():
    sizes = MessageSizes.of(job(), (100_000, 50_000), 1, TreeLimits(6, 0))
    # 8,192 rows of 768 bytes; 63 nodes with a bit for each row; 63 nodes of a block's features, 23 bins to
    # 768 bytes: 15 features of 33 bins fit, of 520 bins.
    assert 8192 * 768 < sizes.longest_question(20, 0) < 8192 * 768 + (2 << 20)
    assert 63 * 15 * 33 // 24 * 768 < sizes.longest_answer([32] * 20, 10) < 4 << 20
    assert sizes.longest_question(20, 1000) > 1000 * 100_000 // 8
    points = MessageSizes.of(job(profile="elgamal"), (100_000,), 1, TreeLimits(6, 0))
    assert (points.ciphertext_bytes, points.pairs_per_ciphertext) == (320, 1)
    assert 8192 * 320 < points.longest_question(20, 0) < 8192 * 320 + (2 << 20)
    assert 63 * 520 * 320 < points.longest_answer([32] * 20, 10) < 63 * 520 * 320 + (2 << 20)
    assert points.longest_answer([32] * 2000, 10) < 63 * 520 * 320 + (2 << 20)  # however wide the party's table is
    plain = MessageSizes.of(job(profile="plain"), (100_000,), 1, TreeLimits(6, 0))
    assert plain.longest_answer([32] * 2000, 10) > 63 * 2000 * 33 * 16
    short = MessageSizes.of(job(profile="elgamal", fraction_bits=20), (100_000,), 1, TreeLimits(6, 0))
    shortest = MessageSizes.of(job(profile="elgamal", fraction_bits=20, point_bytes=32), (9,), 1, TreeLimits(6, 0))
    assert (short.ciphertext_bytes, shortest.ciphertext_bytes) == (192, 96)
    endless = MessageSizes.of(job(), (10**7,), 1, TreeLimits(0, 0))
    assert endless._level_nodes() == MAX_BATCH and endless.longest_question(5, 0) == context.CEILING_BYTES
