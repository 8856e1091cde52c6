"""Every bit of a training row that a passive party tells is counted once: at its splits, and on finished trees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.data.declaration import VerticalRules
from nvflare_plugins.kinds.vertical import messages
from nvflare_plugins.kinds.vertical.guards import Guard
from nvflare_plugins.kinds.vertical.noised import NoisedGuard
from nvflare_plugins.kinds.vertical.passive_party import PassiveParty
from nvflare_plugins.site.memory.released import ReleasedSums
from nvflare_plugins.site.memory.store import Memory
from tests.support.clear_maker import ClearHistogramMaker
from tests.support.vertical_federation import Joined, federate

N_ROWS = 400
FEATURES = np.random.default_rng(5).normal(size=(N_ROWS, 2)).astype(np.float32)
GRADIENTS = np.ones((N_ROWS, 2), dtype="<i8").tobytes()
IDS = [f"person {i}" for i in range(N_ROWS)]


def open_guard(folder: Path, ids=IDS, max_bits=10**6, kind=Guard, **options) -> Guard:
    rules = VerticalRules(min_rows_per_node=1, max_split_bits_per_row=max_bits, max_sums_per_row=10**6)
    return kind(rules, ReleasedSums(Memory(folder, "site"), "patients"), ids, max_share=1e6, **options)


def grown(guard: Guard) -> tuple[PassiveParty, np.ndarray, np.ndarray]:
    """Grow a tree: a split of the party's, below it one of another's, below that one of the party's.

    Returns the party, the rows to the left of the first split, and those of them that reach its last split, node 3.
    """
    party = PassiveParty([FEATURES.T, FEATURES[:50].T], ["a", "b"], 8, ClearHistogramMaker(), guard=guard)
    party.answer(messages.TreeGradients(0, messages.Bits.of(np.ones(2, dtype=bool)), GRADIENTS))
    party.answer(messages.HistogramRequest(0, ()))
    left = party.answer(messages.SplitRequest(0, (messages.OwnedSplit(0, 0, 3, False),))).goes_left[0].unpack()
    party.answer(messages.HistogramRequest(0, (), (messages.OwnDivision(0, 1, 2),)))
    rows = np.flatnonzero(left)
    reaches = np.arange(rows.size) % 3 > 0
    party.answer(messages.HistogramRequest(0, (messages.NodePartition(1, 3, 4, messages.Bits.of(reaches)),)))
    party.answer(messages.SplitRequest(0, (messages.OwnedSplit(3, 1, 3, False),)))
    return party, left, np.isin(np.arange(N_ROWS), rows[reaches])


def ask(party: PassiveParty, node: int, rows: np.ndarray, data_set: int = 0) -> np.ndarray:
    answer = party.answer(messages.DecisionRequest(data_set, (messages.PathQuery(0, node, messages.Bits.of(rows)),)))
    return answer.goes_left[0].unpack()


def bits(guard: Guard) -> np.ndarray:
    return guard._ledger.read().split_bits[guard._places]


@pytest.mark.parametrize("kind", [Guard, NoisedGuard])
@pytest.mark.parametrize("enforce", [True, False], ids=["capped", "counted"])
def test_bits_of_rows_that_do_not_reach_a_node_are_counted(tmp_path, kind, enforce):
    guard = open_guard(tmp_path, kind=kind, enforce=enforce)
    party, left, reaching = grown(guard)
    expected = 1 + left.astype(int) * reaching
    np.testing.assert_array_equal(bits(guard), expected)
    ask(party, 0, np.ones(N_ROWS, dtype=bool))
    np.testing.assert_array_equal(bits(guard), expected)  # told before
    # What an honest active party never asks: the rows that another party's split sent elsewhere.
    answer = ask(party, 3, left)
    threshold = party.table[0, 3].threshold
    np.testing.assert_array_equal(answer, FEATURES[left, 1] < threshold)
    np.testing.assert_array_equal(bits(guard), expected + left)


def test_without_the_count_they_would_leave_unnoticed(tmp_path, monkeypatch):
    monkeypatch.setattr(Guard, "is_new", lambda self, answer: False)
    guard = open_guard(tmp_path, max_bits=2)
    party, left, reaching = grown(guard)
    before = bits(guard)
    ask(party, 0, np.ones(N_ROWS, dtype=bool))
    beyond = left & ~reaching
    np.testing.assert_array_equal(ask(party, 3, beyond), FEATURES[beyond, 1] < party.table[0, 3].threshold)
    np.testing.assert_array_equal(bits(guard), before)


def test_a_row_at_its_cap_ends_the_job_before_an_answer_and_is_not_charged(tmp_path):
    guard = open_guard(tmp_path, max_bits=2)
    party, left, reaching = grown(guard)
    before = bits(guard)
    ask(party, 0, np.ones(N_ROWS, dtype=bool))
    with pytest.raises(PolicyRefusal, match=r"vertical\.max_split_bits_per_row"):
        ask(party, 3, left)
    np.testing.assert_array_equal(bits(guard), before)
    # The same rows as at the split are free, at the cap too, also in the attempt that follows.
    later = PassiveParty(
        [FEATURES.T], ["a", "b"], 8, ClearHistogramMaker(), dict(party.table), open_guard(tmp_path, max_bits=2)
    )
    ask(later, 0, np.ones(N_ROWS, dtype=bool))
    ask(later, 3, reaching)
    np.testing.assert_array_equal(bits(guard), before)


def test_other_values_other_ids_and_other_columns_are_counted_anew_and_another_order_is_not(tmp_path):
    guard = open_guard(tmp_path)
    party, _, _ = grown(guard)
    everyone, before = np.ones(N_ROWS, dtype=bool), bits(guard)

    def charged(features=FEATURES, ids=IDS, names=("a", "b")) -> int:
        one = open_guard(tmp_path, ids)
        first = bits(one).sum()
        ask(PassiveParty([features.T], names, 8, ClearHistogramMaker(), dict(party.table), one), 0, everyone)
        return int(bits(one).sum() - first)

    order = np.random.default_rng(0).permutation(N_ROWS)
    assert charged(FEATURES[order], [IDS[i] for i in order]) == 0
    np.testing.assert_array_equal(bits(guard), before)
    changed = FEATURES.copy()
    changed[7, 0] = -np.sign(changed[7, 0] - party.table[0, 0].threshold) * 9 + party.table[0, 0].threshold
    assert charged(changed) == N_ROWS
    assert charged(FEATURES, [*IDS[1:], "another person"]) == N_ROWS
    assert charged(FEATURES, names=("c", "d")) == N_ROWS
    assert charged(FEATURES, names=("c", "d")) == 0  # by now it was told


def test_rows_left_out_of_a_training_are_counted_where_they_are_of_the_same_table(tmp_path):
    ids = [f"in a fold {i}" for i in range(50)]
    guard = open_guard(tmp_path)
    party, _, _ = grown(guard)
    ask(party, 0, np.ones(50, dtype=bool), data_set=1)
    assert guard._ledger.read().split_bits.size == N_ROWS  # another data set has counts of its own
    guard = open_guard(tmp_path)
    guard.count_answers_about(1, ids)
    party, _, _ = grown(guard)
    ask(party, 0, np.ones(50, dtype=bool), data_set=1)
    np.testing.assert_array_equal(guard._ledger.read().split_bits[N_ROWS:], 1)


def joined(seed: int = 2) -> Joined:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(600, 5)).astype(np.float32)
    features[::9, -1] = np.nan
    features[:3, -2] = np.nan  # too few to be told apart from values
    label = (features[:, 0] * features[:, 3] + features[:, 2] > 0).astype(np.float32)
    return Joined(features, label, (2, 3), (features[:90], label[:90]))


@pytest.mark.parametrize(
    "params",
    [
        {"num_parallel_tree": 3, "subsample": 0.5},  # XGBoost asks for the predictions of all training rows
        {"grow_policy": "lossguide", "max_leaves": 9, "max_depth": 0, "subsample": 0.7},
    ],
    ids=["forest", "lossguide"],
)
@pytest.mark.parametrize("withholds", [True, False], ids=["guarded", "exact"])
def test_an_honest_training_is_charged_at_its_splits_alone_however_it_is_continued(
    tmp_path, params, withholds, monkeypatch
):
    asked = []
    monkeypatch.setattr(Guard, "is_new", lambda self, one, honest=Guard.is_new: asked.append(one) or honest(self, one))
    monkeypatch.setattr(Guard, "charge_answers", lambda self, answers: pytest.fail("charged twice"))
    ids = [str(i) for i in range(600)]
    params = {"objective": "binary:logistic", "max_bin": 16, "max_depth": 4, **params}
    rules = VerticalRules(min_rows_per_node=20, max_sums_per_row=10**6, max_split_bits_per_row=10**6)
    outcome = None
    for _ in range(2):
        guard = Guard(rules, ReleasedSums(Memory(tmp_path, "s"), "d"), ids, max_share=1e6, enforce=withholds)
        outcome = federate(joined(), params, 2, guards=[guard], guarded=withholds, initial=outcome)
        assert guard._told and len(guard._told) <= len(outcome.passives[0].table)
    assert [one for one in asked if one.data_set == 0]
