"""How often the sites meet for a tree: two exchanges for each level of nodes, where nothing takes long."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nvflare_plugins.kinds.vertical.active_party import LabelledSet, OwnColumns, VerticalSettings, VerticalTraining
from nvflare_plugins.kinds.vertical.conversation import FlowControl, Requester, Responder
from nvflare_plugins.kinds.vertical.job import check_vertical_parameters
from nvflare_plugins.kinds.vertical.key_owner import ClearGradientOwner, pair_format
from nvflare_plugins.kinds.vertical.messages import ConversationLink, answer_bytes, place_parties
from nvflare_plugins.kinds.vertical.passive_party import PassiveParty
from tests.support.clear_maker import ClearHistogramMaker
from tests.support.conversations import Site, converse, end_of

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
