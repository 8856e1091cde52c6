"""Trainings in the preset sealed: against a twin in the clear, and what each party sees, refuses and never repeats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from he_processors.errors import ConfigurationError, ProtocolError
from he_processors.histogram.planner import BinLayout
from he_processors.histogram.sums import BinMasks
from he_processors.two_party.split_argmax import NodeSums
from nvflare_plugins.data.declaration import VerticalRules
from nvflare_plugins.kinds.vertical import key_owner, messages
from nvflare_plugins.kinds.vertical.histogram_maker import PairsForm, histogram_maker
from nvflare_plugins.kinds.vertical.job import VerticalJob, check_vertical_parameters
from nvflare_plugins.kinds.vertical.key_owner import SealedGradientOwner, gradient_owner, pair_format
from nvflare_plugins.kinds.vertical.noised import NoisedGuard
from nvflare_plugins.kinds.vertical.passive_party import PassiveParty
from nvflare_plugins.kinds.vertical.sealed import (
    BYTES_PER_CANDIDATE,
    Candidates,
    SealedPassive,
    SealedPlan,
    sealed_plan,
)
from nvflare_plugins.site.memory.released import ReleasedSums
from nvflare_plugins.site.memory.store import Memory
from tests.support.bin_attack import KnownSplit, Tap, attack
from tests.support.clear_splits import clear_scheme, compared_in_the_clear, unmasked
from tests.support.he_toys import toy_paillier
from tests.support.in_process_link import InProcessLink
from tests.support.two_party import Parties, messages_of_level
from tests.support.vertical_federation import Joined, Outcome, central, federate, first_difference, trees

PARAMS = {"objective": "binary:logistic", "max_depth": 3, "max_bin": 8, "eta": 0.5}


def table(n_rows: int = 300, seed: int = 0, widths: tuple[int, int] = (2, 3)) -> Joined:
    """Return a table with missing values, a column of ties and one that is empty."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n_rows, sum(widths))).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = np.nan
    score_of = np.nan_to_num(x[:, 0]) + 2 * np.nan_to_num(x[:, -1], nan=1.0)
    if widths[1] > 2:
        x[:, -2], x[:, -3] = np.round(x[:, -2]), np.nan
    return Joined(x, (score_of + rng.normal(size=n_rows) > 0).astype(np.float32), widths)


def plan_of(params: dict[str, Any] = PARAMS, **changes: Any) -> SealedPlan:
    fields = {"active": "a", "data_set": "d", "label": "y", "preset": "sealed", "params": params, **changes}
    checked = check_vertical_parameters({"nthread": 1, **params}, ["any"])
    plan = sealed_plan(VerticalJob(**fields), checked)
    assert plan is not None
    return plan


def train(
    joined: Joined, n_rounds: int = 2, params: dict[str, Any] = PARAMS, kind=gradient_owner, **options
) -> Outcome:
    plan = plan_of(params)

    def scheme(n_rows: int):
        owner = kind(toy_paillier(), plan.pair_format(n_rows))
        form = PairsForm(is_masked=True)
        return owner, lambda: histogram_maker(owner.setup, n_rows, allow_toy_keys=True, form=form)

    return federate(joined, params, n_rounds, scheme, planned=plan, **options)


@pytest.mark.parametrize(
    ("params", "widths"),
    [
        (PARAMS, (2, 3)),
        ({**PARAMS, "objective": "reg:squarederror", "lambda": 0, "min_child_weight": 0}, (1, 3)),
        ({**PARAMS, "gamma": 0.5, "subsample": 0.7, "colsample_bytree": 0.6}, (0, 4)),
    ],
)
def test_a_training_is_that_of_its_twin_in_the_clear(params, widths):
    joined = table(widths=widths)
    outcome = train(joined, params=params)
    merged = outcome.merged()
    with compared_in_the_clear():
        assert first_difference(merged, train(joined, params=params).merged()) == ""
        twin = federate(joined, params, 2, clear_scheme, planned=plan_of(params), noise_of=unmasked)
        assert first_difference(merged, twin.merged()) == ""
    assert outcome.passives[0].table
    ours, theirs = outcome.predict(joined, 0), central(joined, params, 2).predict(joined.matrix(joined.features))
    if params is PARAMS:
        assert np.corrcoef(ours, theirs)[0, 1] > 0.99


def test_nodes_whose_hessians_round_to_zero_are_not_split():
    params = {**PARAMS, "lambda": 0, "min_child_weight": 0, "base_score": 1e-9}
    assert not train(table(60), 1, params).passives[0].table


def test_the_model_says_no_column_of_the_passive_party():
    outcome = train(table())
    named = {
        (feature, left)
        for tree in trees(outcome.result.model)
        for feature, left, child in zip(tree["split_indices"], tree["default_left"], tree["left_children"], strict=True)
        if child >= 0 and feature >= 2
    }
    assert named == {(2, 0)}
    assert 2 in {split.feature for split in outcome.passives[0].table.values()}


class _Noting(SealedGradientOwner):
    """The key owner, which tells a tap what it encrypts and opens."""

    tap: Tap

    def encrypt(self, g, h):
        if sum(map(len, self.tap._gradients)) == self.tap._n_rows:
            self.tap.finish()
        self.tap._gradients.append(np.stack([g, h], axis=1))
        return super().encrypt(g, h)

    def open_sums(self, sums, layout, totals):
        opened = super().open_sums(sums, layout, totals)
        self.tap.layout = layout
        self.tap._sums += [np.stack([one.g, one.h], axis=1) for one in opened]
        return opened


@pytest.mark.slow
def test_the_attack_on_all_that_the_active_party_sees_does_not_beat_the_splits(monkeypatch):
    """It even gets which columns split, which sealed does not say. With the masks taken off the attack succeeds."""
    joined, masks, won = table(150, widths=(1, 3)), [], []
    tap = Tap(pair_format(150), 150)
    draw, winner = BinMasks.draw, SealedPassive.winner
    monkeypatch.setattr(BinMasks, "draw", lambda *a: masks.append(draw(*a)) or masks[-1])
    monkeypatch.setattr(SealedPassive, "winner", lambda *a: won.append(winner(*a)) or won[-1])
    monkeypatch.setattr("nvflare_plugins.kinds.vertical.key_owner.SealedGradientOwner", _Noting)
    _Noting.tap = tap
    outcome = train(joined, 12, {**PARAMS, "max_depth": 4, "min_child_weight": 0}, listen=tap.listen)
    tap.finish()
    known = iter(won)
    seen = [replace(t, splits=[_named(s, next(known)) for s in t.splits]) for t in tap.trees]
    codes = outcome.passives[0]._codes
    found = attack(seen, tap.layout, codes)
    assert found.by_least_squares < found.by_guessing + 0.1 and found.by_all < found.by_splits + 0.02
    shares = iter(np.concatenate([np.stack(m.shares(), axis=1) for m in masks]).view(np.int64))
    opened = [replace(t, sums=t.sums + np.array([[next(shares) for _ in s] for s in t.sums])) for t in seen]
    assert attack(opened, tap.layout, codes).by_least_squares > found.by_least_squares + 0.5


def _named(split: KnownSplit, won: tuple[int, int, bool]) -> KnownSplit:
    return replace(split, feature=won[0], bin=won[1], default_left=won[2])


def test_no_mask_and_no_message_comes_twice_also_when_a_training_goes_on(monkeypatch):
    masks, said = [], []
    draw, ask = BinMasks.draw, messages.to_bytes
    monkeypatch.setattr(BinMasks, "draw", lambda *a: masks.append(draw(*a)) or masks[-1])

    def noted(message: Any) -> bytes:
        if isinstance(message, messages.Transfers | messages.TransfersAnswer | messages.SealedRequest):
            said.extend(part for part in (getattr(message, name, b"") for name in ("offer", "choices", "data")) if part)
        return ask(message)

    monkeypatch.setattr("tests.support.in_process_link.to_bytes", noted)
    joined = table()
    first = train(joined, 1)
    train(joined, 1, initial=first, is_resumed=True)
    train(joined, 1)
    rows = np.concatenate([m.rows for m in masks])
    assert len(np.unique(rows, axis=0)) == len(rows) > 200
    assert len(set(said)) == len(said) > 20


def test_lengths_and_numbers_of_messages_do_not_depend_on_data(monkeypatch):
    lengths: list[list[tuple[str, int]]] = []
    ask = messages.to_bytes

    def noted(message: Any) -> bytes:
        lengths[-1].append((type(message).__name__, len(ask(message))))
        return ask(message)

    monkeypatch.setattr("tests.support.in_process_link.to_bytes", noted)
    rng = np.random.default_rng(0)
    for _ in range(3):
        lengths.append([])
        x = rng.permuted(np.tile(np.arange(64, dtype=np.float32), (4, 1)), axis=1).T
        label = (x[:, 3] + 20 * rng.normal(size=64) > 31).astype(np.float32)
        train(Joined(x, label, (1, 3)), 2, {**PARAMS, "max_depth": 1})
    sealed_ones = [[one for one in of if "Split" not in one[0]] for of in lengths]
    assert sealed_ones[0] == sealed_ones[1] == sealed_ones[2]


def _seen(joined: Joined, params: dict[str, Any], monkeypatch) -> tuple[Outcome, list[Any], list[np.ndarray]]:
    """Train; return all messages in order, and what the active party opens."""
    said: list[Any] = []
    opened: list[np.ndarray] = []
    sent, open_shares = messages.to_bytes, key_owner.open_shares
    with monkeypatch.context() as patch:
        patch.setattr("tests.support.in_process_link.to_bytes", lambda m: said.append(m) or sent(m))
        patch.setattr(key_owner, "open_shares", lambda *a: opened.append(open_shares(*a)) or opened[-1])
        return train(joined, 2, params), said, opened


@pytest.mark.parametrize("whose", ["passive", "active"])
def test_who_sees_what_is_declared_sees_no_more(whose, monkeypatch):
    """Two tables of one party for which the other one sees the same model and partitions: no message tells them apart.

    What is not equal is random: counts of bytes agree within six standard deviations of chi-square (255 degrees).
    """
    rng, params = np.random.default_rng(5), {**PARAMS, "max_depth": 2, "base_score": 0.5, "eta": 0.1}
    x = rng.normal(size=(200, 4)).astype(np.float32)
    y = (x[:, 3] + x[:, 0] / 2 > 0).astype(np.float32)
    other, labels = x.copy(), y if whose == "passive" else 1 - y
    if whose == "passive":
        other[:, 2] = rng.permutation(x[:, 2])  # never the best
    one = _seen(Joined(x, y, (1, 3)), params, monkeypatch)
    two = _seen(Joined(other, labels, (1, 3)), params, monkeypatch)
    assert one[0].passives[0].table == two[0].passives[0].table
    random: list[list[bytes]] = [[], []]
    for messages_of in zip(one[1], two[1], strict=True):
        assert len({(type(m), len(messages.to_bytes(m))) for m in messages_of}) == 1
        is_sealed = hasattr(messages_of[0], "data") and len(messages_of[0].data) > 1
        if is_sealed:
            for m, parts in zip(messages_of, random, strict=True):
                parts.append(m.data)
        elif not isinstance(messages_of[0], _ENCRYPTED):
            assert messages_of[0] == messages_of[1]
    a, b = (np.bincount(np.frombuffer(b"".join(parts), np.uint8), minlength=256) for parts in random)
    assert ((a - b) ** 2 / (a + b)).sum() < 255 + 6 * np.sqrt(510)
    for _, _, opened in (one, two):
        found = np.bincount(np.concatenate(opened, axis=None).view(np.uint8), minlength=256)
        assert ((found - found.mean()) ** 2 / found.mean()).sum() < 255 + 6 * np.sqrt(510)


_ENCRYPTED = (
    messages.TreeGradients,
    messages.MoreGradients,
    messages.HistogramAnswer,
    messages.Transfers,
    messages.TransfersAnswer,
)


def _party(plan: SealedPlan, joined: Joined) -> PassiveParty:
    n_rows = len(joined.label)
    owner = gradient_owner(toy_paillier(), plan.pair_format(n_rows))
    maker = histogram_maker(owner.setup, n_rows, allow_toy_keys=True, form=PairsForm(is_masked=True))
    columns = [joined.part(1, joined.features).T]
    return PassiveParty(columns, ["x0", "x1", "x2"], 8, maker, noise=SealedPassive(plan, 1))


@pytest.mark.parametrize("number", range(12))
def test_messages_that_are_malformed_repeated_or_out_of_order_are_refused(number, monkeypatch):
    """The party answers a whole training; then one message is changed, repeated or put elsewhere."""
    joined, seen = table(60), []
    honest = PassiveParty.answer

    def told(self, request):
        seen.append(request)
        kinds = [type(one).__name__ for one in seen]
        wrong = _wrong(number, seen)
        if wrong is None:
            return honest(self, request)
        if number == 9:
            monkeypatch.setattr(self._sealed._candidates, "nodes_at_once", 1)
        with pytest.raises(ProtocolError):
            honest(self, wrong)
        raise ConfigurationError(f"refused after {kinds}")

    monkeypatch.setattr(PassiveParty, "answer", told)
    with pytest.raises(ConfigurationError, match="refused after"):
        train(joined, 1)


def _wrong(number: int, seen: list[Any]) -> Any:
    """Return what comes in the place of the last request, once it is time; None before."""
    last = seen[-1]
    of_step = last.step if isinstance(last, messages.SealedRequest) else None
    cases = {
        0: isinstance(last, messages.Transfers) and not last.choices and replace(last, offer=bytes(32)),
        1: isinstance(last, messages.Transfers) and last.choices and replace(last, choices=last.choices[:-32]),
        2: of_step == 0 and replace(last, step=1),
        3: of_step == 0 and replace(last, data=last.data[:-1]),
        4: of_step == 0 and replace(last, nodes=(*last.nodes, 7)),
        5: of_step == 1 and replace(last, data=last.data[:-16]),
        6: of_step == 2 and replace(last, tree=1),
        7: of_step == 2 and seen[-2],  # the circuit of scores once more
        8: isinstance(last, messages.SplitRequest)
        and replace(last, splits=(replace(last.splits[0], feature=1), *last.splits[1:])),
        9: of_step == 0 and len(last.nodes) > 1 and last,
        10: isinstance(last, messages.Transfers) and not last.choices and replace(last, choices=bytes(4096)),
        11: isinstance(last, messages.Transfers) and last.choices and replace(last, offer=bytes(32)),
    }
    return cases[number] or None


def test_a_party_of_another_preset_has_no_answer_to_messages_of_this_one(monkeypatch):
    monkeypatch.setattr(SealedPassive, "transfers", lambda self, request: pytest.fail("answered"))
    party = _party(plan_of(), table(60))
    party._sealed = None
    with pytest.raises(ProtocolError, match="no answer to Transfers"):
        party.answer(messages.Transfers(bytes(32), b""))


@pytest.mark.parametrize("n_bins", [(1,), (3, 1, 4)])
def test_candidates_are_all_thresholds_with_missing_values_on_either_side(n_bins):
    layout, rng = BinLayout(n_bins), np.random.default_rng(1)
    codes = np.stack([rng.integers(0, n + 1, 50) for n in n_bins])
    codes[0, codes[0] == n_bins[0]] = 0  # nothing is missing there
    values = rng.integers(-1000, 1000, 50)
    candidates = Candidates(layout)
    slots = np.concatenate([np.bincount(c, values, n + 1) for c, n in zip(codes, n_bins, strict=True)]).astype(np.int64)
    counts = np.concatenate([np.bincount(c, minlength=n + 1) for c, n in zip(codes, n_bins, strict=True)])
    sums = candidates.left_sums(slots[None].view(np.uint64)).view(np.int64)[0]
    for floor in (1, 5):
        allowed = candidates.allowed(counts[None], floor)[0]
        seen = set()
        for number in range(candidates.n):
            feature, last_bin, default_left = candidates.split(number)
            is_missing = codes[feature] == n_bins[feature]
            goes_left = np.where(is_missing, default_left, codes[feature] <= last_bin)
            assert sums[number] == values[goes_left].sum()
            is_due = floor <= goes_left.sum() <= 50 - floor and (is_missing.any() or not default_left)
            assert allowed[number] == is_due
            seen.add((feature, last_bin, default_left))
        assert len(seen) == candidates.n == 2 * sum(n_bins)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"alpha": 1}, "reg_alpha"),
        ({"max_delta_step": 1}, "max_delta_step"),
        ({"max_leaves": 4}, "max_leaves"),
        ({"colsample_bynode": 0.5}, "colsample_bynode"),
        ({"colsample_bylevel": 0.5}, "colsample_bylevel"),
        ({"grow_policy": "lossguide"}, "grow_policy"),
        ({"monotone_constraints": "(1)"}, "monotone_constraints"),
        ({"interaction_constraints": "[[0]]"}, "interaction_constraints"),
        ({"max_bin": 65}, "64 bins"),
        ({"objective": "reg:tweedie"}, "public bound"),
    ],
)
def test_what_the_circuits_do_not_know_is_refused_by_name(params, name):
    with pytest.raises(ConfigurationError, match=name):
        plan_of({**PARAMS, **params})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"profile": "elgamal"}, "profile paillier"),
        ({"profile": "plain"}, "profile paillier"),
        ({"weight": "w"}, "weight is refused"),
        ({"categories": {"b": {"c": ["x", "y"]}}}, "categories of a passive party"),
    ],
)
def test_jobs_that_sealed_sums_cannot_do_are_refused(changes, words):
    with pytest.raises(ConfigurationError, match=words):
        plan_of(**changes)


def test_more_rows_than_circuits_add_up_are_refused():
    with pytest.raises(ConfigurationError, match="do not fit its circuits"):
        plan_of({**PARAMS, "lambda": 1e9}).pair_format(1 << 30)


def test_caps_and_floors_of_the_passive_party_hold(tmp_path):
    """No row shows more bits than the cap, and no split leaves fewer rows than the floor on a side."""
    joined, told = table(400, widths=(1, 3)), []
    rules = VerticalRules(max_split_bits_per_row=2)
    ledger = ReleasedSums(Memory(tmp_path, "site"), "data")
    guard = NoisedGuard(rules, ledger, [str(i) for i in range(400)], sums_per_set=0)

    def listen(link: InProcessLink) -> InProcessLink:
        honest = link._answer

        def answer(sent: bytes):
            reply = honest(sent)
            told.extend(reply.goes_left if isinstance(reply, messages.SplitAnswer) else ())
            return reply

        link._answer = answer
        return link

    def with_floor(plan: SealedPlan, n_features: int) -> SealedPassive:
        return SealedPassive(plan, 30)

    outcome = train(joined, 3, guards=[guard], guarded=True, listen=listen, noise_of=with_floor)
    found = guard.exposure()
    assert outcome.passives[0].table and found.nodes_withheld
    assert (found.split_bits_max, found.n_sums, found.per_row_max) == (2, 0, 0)
    assert all(30 <= bits.unpack().sum() <= bits.n - 30 for bits in told)


@pytest.mark.parametrize("n_rows", [1, 1 << 14, 1 << 23])
def test_no_message_is_longer_than_receivers_allow(n_rows):
    terms, n = plan_of({**PARAMS, "lambda": 0, "min_child_weight": 0}).terms, 8
    node = NodeSums(-100, n_rows << 12, n_rows)
    zeros = np.zeros((1, n), dtype=np.int64)
    said, winners = messages_of_level(*Parties.of(terms).level([node], n), zeros, zeros)
    assert max(map(len, said)) < n * BYTES_PER_CANDIDATE and winners.tolist() == [-1]
