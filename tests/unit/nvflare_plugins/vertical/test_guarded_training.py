"""Whole trainings in which passive parties keep sums: what leaves, that training goes on, and who may not withhold."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import ProtocolError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.data.declaration import VerticalRules
from nvflare_plugins.kinds.vertical import messages
from nvflare_plugins.kinds.vertical.guards import Guard
from nvflare_plugins.kinds.vertical.key_owner import pair_format
from nvflare_plugins.kinds.vertical.noised import NoisedGuard
from nvflare_plugins.kinds.vertical.passive_party import PassiveParty
from nvflare_plugins.site.memory.released import ReleasedSums
from nvflare_plugins.site.memory.store import RELEASED_SUMS, Memory
from tests.support.bin_attack import Tap
from tests.support.clear_maker import ClearHistogramMaker
from tests.support.in_process_link import InProcessLink
from tests.support.vertical_federation import Joined, federate, first_difference, make_clear, make_paillier, trees

N_ROWS = 1500
FLOOR = 60
PARAMS = {"objective": "binary:logistic", "max_depth": 5, "max_bin": 32}


def data(widths=(3, 3)) -> Joined:
    rng = np.random.default_rng(2)
    features = rng.normal(size=(N_ROWS, sum(widths))).astype(np.float32)
    features[::9, -1] = np.nan
    signal = features[:, 0] * features[:, 3] + features[:, 4] - 0.5 * features[:, 1]
    label = (signal + rng.normal(size=N_ROWS) > 0).astype(np.float32)
    return Joined(features, label, widths, (features[:200], label[:200]))


def guard(folder, floor=FLOOR, max_sums=10**6, max_share=1e6, name="data", max_bits=10**6, **options) -> Guard:
    rules = VerticalRules(min_rows_per_node=floor, max_sums_per_row=max_sums, max_split_bits_per_row=max_bits)
    ids = [str(i) for i in range(N_ROWS)]
    return Guard(rules, ReleasedSums(Memory(folder, "site"), name), ids, max_share=max_share, **options)


def guarded(joined: Joined, num_rounds: int, guards: list[Guard], **params):
    tap = Tap(pair_format(N_ROWS), N_ROWS)
    listen = tap.listen if len(guards) == 1 else lambda link: link
    outcome = federate(
        joined,
        {**PARAMS, **params},
        num_rounds,
        scheme=lambda n_rows: (tap, ClearHistogramMaker),
        guards=guards,
        listen=listen,
        guarded=True,
    )
    tap.finish()
    return outcome, tap


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"grow_policy": "lossguide", "max_leaves": 12, "max_depth": 0},
        {"num_parallel_tree": 3, "subsample": 0.5},
        {"colsample_bytree": 0.5, "colsample_bynode": 0.6},
    ],
    ids=["depthwise", "lossguide", "forest", "columns"],
)
def test_no_released_set_and_no_difference_within_a_tree_is_below_the_floor(tmp_path, params):
    fraction = params.get("subsample", 1.0)
    outcome, tap = guarded(data(), 4, [guard(tmp_path, row_fraction=fraction)], **params)
    floor = FLOOR / fraction
    n_withheld = 0
    for tree in tap.trees:
        known = [frozenset(tree.nodes[0].tolist())]
        for rows in tree.nodes[1:]:
            child = frozenset(rows.tolist())
            parent = min((one for one in known if child < one), key=len)
            known += [child, parent - child]
        assert min(map(len, known)) >= floor
        assert all(len(a - b) >= floor or a <= b for a in known for b in known if a & b)
        n_withheld += len(known) < 5
    exposure = outcome.passives[0].guard.exposure()
    assert exposure.nodes_withheld > 0
    assert exposure.n_sums == 2 * sum(len(tree.nodes) for tree in tap.trees)
    assert outcome.passives[0].table  # it still wins splits
    # What the parties hold together is one model: the engine compared every tree with XGBoost's, and paths agree.
    merged = xgb.Booster(model_file=bytearray(outcome.merged()))
    joined = data()
    matrix = xgb.DMatrix(joined.features, feature_names=merged.feature_names)
    assert np.array_equal(merged.predict(matrix), outcome.predict(joined, 0))


def test_guards_that_withhold_nothing_change_nothing(tmp_path):
    joined = data((2, 2, 2))
    lenient = [guard(tmp_path, 1, name=str(i)) for i in range(2)]
    outcome, _ = guarded(joined, 4, lenient, min_child_weight=0.5)
    assert all(one.exposure().nodes_withheld == 0 for one in lenient)
    plain = federate(joined, {**PARAMS, "min_child_weight": 0.5}, 4)
    assert first_difference(outcome.merged(), plain.merged()) == ""


def test_under_encryption_the_same_sums_are_withheld_and_the_model_is_the_same(tmp_path):
    rng = np.random.default_rng(7)
    features = rng.normal(size=(200, 4)).astype(np.float32)
    joined = Joined(features, (features[:, 0] + features[:, 3] > 0).astype(np.float32), (2, 2))
    models = []
    for name, scheme in (("clear", make_clear), ("encrypted", make_paillier)):
        memory = Memory(tmp_path / name, "site")
        memory.secret(RELEASED_SUMS, bytes(32))  # the same keys of rows
        ledger = ReleasedSums(memory, "data")
        rules = VerticalRules(min_rows_per_node=40)
        one = Guard(rules, ledger, [str(i) for i in range(200)], max_share=1e6)
        outcome = federate(joined, {**PARAMS, "max_bin": 6}, 2, scheme=scheme, guards=[one], guarded=True)
        assert one.exposure().nodes_withheld
        models.append(outcome.merged())
    assert first_difference(*models) == ""


def test_a_party_that_gives_nothing_leaves_the_others_to_train_without_it(tmp_path):
    joined = data()
    closed = guard(tmp_path, floor=N_ROWS + 1)
    outcome, tap = guarded(joined, 3, [closed])
    assert not outcome.passives[0].table and not tap.trees
    alone = federate(joined, PARAMS, 3, own_rounds=3)
    assert first_difference(outcome.result.model, alone.result.model) == ""
    assert closed.exposure().nodes_withheld == 1  # it was not asked again
    three = data((2, 2, 2))
    outcome, _ = guarded(three, 3, [guard(tmp_path, floor=N_ROWS + 1), guard(tmp_path, 1, name="other")])
    assert not outcome.passives[0].table and outcome.passives[1].table


def test_a_party_at_its_cap_stops_in_the_middle_of_the_training(tmp_path):
    outcome, tap = guarded(data(), 6, [guard(tmp_path, max_sums=10)])
    used = {tree for tree, _ in outcome.passives[0].table}
    assert used and max(used) < 5 and len(trees(outcome.result.model)) == 6
    assert outcome.passives[0].guard.exposure().per_row_max <= 10
    again, tap = guarded(data(), 2, [guard(tmp_path, max_sums=10)])
    assert not tap.trees and not again.passives[0].table  # the next job gets nothing at all


def test_rows_are_divided_by_no_more_splits_than_the_cap(tmp_path, monkeypatch):
    """Counted from what leaves: the model's own splits show ordered bits, one for each row of their nodes."""
    shown = np.zeros(N_ROWS, dtype=int)
    honest = PassiveParty._splits

    def splits(self, request):
        answer = honest(self, request)
        for split in request.splits:
            shown[self._rows[split.node]] += 1
        return answer

    monkeypatch.setattr(PassiveParty, "_splits", splits)
    one = guard(tmp_path, floor=1, max_bits=4)
    outcome, tap = guarded(data(), 4, [one])
    assert shown.max() == 4 == one.exposure().split_bits_max and one.exposure().nodes_withheld
    assert one.exposure().split_bits_mean == pytest.approx(shown.mean())
    assert len(trees(outcome.result.model)) == 4
    again, tap = guarded(data(), 2, [guard(tmp_path, floor=1, max_bits=4)])
    assert not tap.trees and not again.passives[0].table  # the next job gets nothing at all


def test_nothing_is_said_about_rows_below_a_withheld_node(tmp_path, monkeypatch):
    requests, withheld = [], []
    honest = InProcessLink._answer

    def answer(self, sent):
        reply = honest(self, sent)
        requests.append(sent)
        if isinstance(reply, messages.HistogramAnswer):
            withheld.extend((reply.tree, node) for node in reply.withheld)
        return reply

    monkeypatch.setattr(InProcessLink, "_answer", answer)
    outcome, _ = guarded(data(), 3, [guard(tmp_path)])
    passive = outcome.passives[0]
    assert withheld
    below = {(tree, node) for tree, node in passive.table if (tree, node) in withheld}
    assert not below
    # The party keeps no rows of nodes that are closed to it.
    assert not set(passive._rows) & {node for tree, node in withheld if tree == 2}


def changing(monkeypatch, change):
    honest = InProcessLink._answer
    monkeypatch.setattr(InProcessLink, "_answer", lambda self, sent: change(honest(self, sent)))


def keeps_all(answer):
    if not isinstance(answer, messages.HistogramAnswer):
        return answer
    return dataclasses.replace(answer, nodes=(), sums=b"", withheld=answer.nodes)


def keeps_another(answer):
    return dataclasses.replace(answer, withheld=(77,)) if isinstance(answer, messages.HistogramAnswer) else answer


def gives_and_keeps(answer):
    return (
        dataclasses.replace(answer, withheld=answer.nodes) if isinstance(answer, messages.HistogramAnswer) else answer
    )


def test_exact_jobs_refuse_a_party_that_withholds(monkeypatch):
    changing(monkeypatch, keeps_all)
    with pytest.raises(ProtocolError, match="withheld"):
        federate(data(), PARAMS, 1)


@pytest.mark.parametrize("change", [keeps_another, gives_and_keeps])
def test_guarded_jobs_refuse_answers_about_other_nodes(monkeypatch, change):
    changing(monkeypatch, change)
    with pytest.raises(ProtocolError, match="other nodes"):
        federate(data(), PARAMS, 1, guarded=True)


def test_a_split_of_a_withheld_node_is_refused(tmp_path):
    joined = data()
    party = PassiveParty(
        [joined.part(1, joined.features).T], ["a", "b", "c"], 32, ClearHistogramMaker(), None, guard(tmp_path)
    )
    party.answer(
        messages.TreeGradients(0, messages.Bits.of(np.ones(3, dtype=bool)), np.zeros((N_ROWS, 2), "<i8").tobytes())
    )
    assert party.answer(messages.HistogramRequest(0, ())).nodes == (0,)
    few = messages.Bits.of(np.arange(N_ROWS) < 10)
    answer = party.answer(messages.HistogramRequest(0, (messages.NodePartition(0, 1, 2, few),)))
    assert (answer.nodes, answer.sums, answer.withheld) == ((), b"", (1,))
    for node in (0, 1, 2):
        with pytest.raises(ProtocolError):
            party.answer(messages.SplitRequest(0, (messages.OwnedSplit(node, 0, 3, False),)))
    for node in (1, 2):
        with pytest.raises(ProtocolError):
            party.answer(messages.HistogramRequest(0, (messages.NodePartition(node, 3, 4, few),)))


def test_too_many_bins_are_refused_before_anything_is_sent(tmp_path):
    with pytest.raises(PolicyRefusal, match="max_bins"):
        guarded(data(), 1, [guard(tmp_path)], max_bin=64)


def test_rare_categories_and_too_few_missing_ones_go_one_way_in_training_and_in_prediction(tmp_path):
    """Too few missing values count as a category in training: the owner keeps that category's side for them."""
    rng = np.random.default_rng(5)
    codes = rng.choice(6, size=N_ROWS, p=[0.3, 0.25, 0.2, 0.2, 0.03, 0.02])
    features = np.column_stack([rng.normal(size=N_ROWS), codes, rng.normal(size=N_ROWS)]).astype(np.float32)
    label = (np.isin(codes, [1, 3, 5]) ^ (features[:, 0] > 1)).astype(np.float32)
    features[:4, 1] = np.nan
    joined = Joined(features, label, (1, 2), categories={1: list("abcdef")})
    outcome = federate(joined, PARAMS, 3, guards=[guard(tmp_path)], guarded=True)
    splits = [s for passive in outcome.passives for s in passive.table.values() if s.categories is not None]
    assert splits and all((4 in s.categories) == (5 in s.categories) for s in splits)
    merged = xgb.Booster(model_file=bytearray(outcome.merged()))
    names = merged.feature_names
    np.testing.assert_array_equal(
        outcome.predict(joined, 0), merged.predict(joined.matrix(features, feature_names=names))
    )
    as_rare = features.copy()
    as_rare[:4, 1] = 5  # rare categories have the last bin
    leaves = [merged.predict(joined.matrix(x, feature_names=names), pred_leaf=True) for x in (features, as_rare)]
    np.testing.assert_array_equal(*leaves)


# -- bits of rows are counted ------------------------------------------------------------------------------------------


FEW_ROWS = 400
FEATURES = np.random.default_rng(5).normal(size=(FEW_ROWS, 2)).astype(np.float32)
GRADIENTS = np.ones((FEW_ROWS, 2), dtype="<i8").tobytes()
IDS = [f"person {i}" for i in range(FEW_ROWS)]


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
    return party, left, np.isin(np.arange(FEW_ROWS), rows[reaches])


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
    ask(party, 0, np.ones(FEW_ROWS, dtype=bool))
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
    ask(party, 0, np.ones(FEW_ROWS, dtype=bool))
    beyond = left & ~reaching
    np.testing.assert_array_equal(ask(party, 3, beyond), FEATURES[beyond, 1] < party.table[0, 3].threshold)
    np.testing.assert_array_equal(bits(guard), before)


def test_a_row_at_its_cap_ends_the_job_before_an_answer_and_is_not_charged(tmp_path):
    guard = open_guard(tmp_path, max_bits=2)
    party, left, reaching = grown(guard)
    before = bits(guard)
    ask(party, 0, np.ones(FEW_ROWS, dtype=bool))
    with pytest.raises(PolicyRefusal, match=r"vertical\.max_split_bits_per_row"):
        ask(party, 3, left)
    np.testing.assert_array_equal(bits(guard), before)
    # The same rows as at the split are free, at the cap too, also in the attempt that follows.
    later = PassiveParty(
        [FEATURES.T], ["a", "b"], 8, ClearHistogramMaker(), dict(party.table), open_guard(tmp_path, max_bits=2)
    )
    ask(later, 0, np.ones(FEW_ROWS, dtype=bool))
    ask(later, 3, reaching)
    np.testing.assert_array_equal(bits(guard), before)


def test_other_values_other_ids_and_other_columns_are_counted_anew_and_another_order_is_not(tmp_path):
    guard = open_guard(tmp_path)
    party, _, _ = grown(guard)
    everyone, before = np.ones(FEW_ROWS, dtype=bool), bits(guard)

    def charged(features=FEATURES, ids=IDS, names=("a", "b")) -> int:
        one = open_guard(tmp_path, ids)
        first = bits(one).sum()
        ask(PassiveParty([features.T], names, 8, ClearHistogramMaker(), dict(party.table), one), 0, everyone)
        return int(bits(one).sum() - first)

    order = np.random.default_rng(0).permutation(FEW_ROWS)
    assert charged(FEATURES[order], [IDS[i] for i in order]) == 0
    np.testing.assert_array_equal(bits(guard), before)
    changed = FEATURES.copy()
    changed[7, 0] = -np.sign(changed[7, 0] - party.table[0, 0].threshold) * 9 + party.table[0, 0].threshold
    assert charged(changed) == FEW_ROWS
    assert charged(FEATURES, [*IDS[1:], "another person"]) == FEW_ROWS
    assert charged(FEATURES, names=("c", "d")) == FEW_ROWS
    assert charged(FEATURES, names=("c", "d")) == 0  # by now it was told


def test_rows_left_out_of_a_training_are_counted_where_they_are_of_the_same_table(tmp_path):
    ids = [f"in a fold {i}" for i in range(50)]
    guard = open_guard(tmp_path)
    party, _, _ = grown(guard)
    ask(party, 0, np.ones(50, dtype=bool), data_set=1)
    assert guard._ledger.read().split_bits.size == FEW_ROWS  # another data set has counts of its own
    guard = open_guard(tmp_path)
    guard.count_answers_about(1, ids)
    party, _, _ = grown(guard)
    ask(party, 0, np.ones(50, dtype=bool), data_set=1)
    np.testing.assert_array_equal(guard._ledger.read().split_bits[FEW_ROWS:], 1)


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
    asked, answers = [], []

    def is_new(self, one, honest=Guard.is_new):
        asked.append(one)
        answers.append(honest(self, one))
        return answers[-1]

    monkeypatch.setattr(Guard, "is_new", is_new)
    ids = [str(i) for i in range(600)]
    params = {"objective": "binary:logistic", "max_bin": 16, "max_depth": 4, **params}
    rules = VerticalRules(min_rows_per_node=20, max_sums_per_row=10**6, max_split_bits_per_row=10**6)
    outcome = None
    for _ in range(2):
        guard = Guard(rules, ReleasedSums(Memory(tmp_path, "s"), "d"), ids, max_share=1e6, enforce=withholds)
        outcome = federate(joined(), params, 2, guards=[guard], guarded=withholds, initial=outcome)
        assert guard._told and len(guard._told) <= len(outcome.passives[0].table)
    assert [one for one in asked if one.data_set == 0] and not any(answers)
