"""The active party's guards: lies, silence and disagreement end the job with a clear error, and never hang it."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from functools import partial

import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import CapacityExceeded, ConfigurationError, ProtocolError
from he_processors.fixed_point import REFUSED
from nvflare_plugins.base.errors import DataRefusal, JobAborted
from nvflare_plugins.kinds.vertical import active_party as training
from nvflare_plugins.kinds.vertical import messages
from nvflare_plugins.kinds.vertical.key_owner import ClearGradientOwner, pair_format
from nvflare_plugins.kinds.vertical.passive_party import PassiveParty
from tests.support.clear_maker import ClearHistogramMaker
from tests.support.in_process_link import InProcessLink
from tests.support.vertical_federation import Joined, Outcome, federate, first_difference

PARAMS = {"objective": "binary:logistic", "max_depth": 3}


def data(with_valid: bool = False) -> Joined:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(400, 6)).astype(np.float32)
    label = (features[:, 0] + features[:, 4] + rng.normal(size=400) * 0.3 > 0).astype(np.float32)
    valid = (features[:90], label[:90]) if with_valid else None
    return Joined(features, label, (2, 2, 2), valid)


def scheme_with(change):
    """Return the stand-in with passive parties that change the sums they send."""

    class Liar(ClearHistogramMaker):
        def sum_bins(self, codes, layout, node_rows, features=None, noise=None):
            return change(super().sum_bins(codes, layout, node_rows))

    return lambda n_rows: (ClearGradientOwner(pair_format(n_rows)), Liar)


def changed(position: int, by: int):
    def change(sums: bytes) -> bytes:
        values = np.frombuffer(sums, "<i8").copy()
        values[position] += by
        return values.tobytes()

    return change


def moved(by: int):
    return lambda sums: changed(2, -by)(changed(0, by)(sums))


@pytest.mark.parametrize(
    "change",
    [
        changed(0, 1),
        changed(1, 1),
        changed(-1, -1),
        moved(1 << 61),
        lambda sums: sums[:-8],
        lambda sums: sums + bytes(16),
    ],
    ids=["gradient", "hessian", "missing", "out_of_bounds", "short", "long"],
)
def test_sums_that_cannot_be_right_are_refused_with_one_message(change):
    with pytest.raises(ProtocolError) as caught:
        federate(data(), PARAMS, 2, scheme=scheme_with(change))
    assert str(caught.value) == REFUSED


class StreamedOwner(ClearGradientOwner):
    is_streamed = True

    def __init__(self, pairs):
        super().__init__(pairs)
        self.calls: list[str] = []

    def open_sums(self, sums, layout, totals):
        self.calls.append("open")
        return super().open_sums(sums, layout, totals)

    def finish_sums(self, since_s):
        assert 0 <= time.perf_counter() - since_s < 60
        self.calls.append("finish")


StreamedMaker = partial(ClearHistogramMaker, is_streamed=True)


def streamed(n_rows: int):
    """The stand-in, with sums in blocks of features as under encryption."""
    return StreamedOwner(pair_format(n_rows)), StreamedMaker


@pytest.mark.parametrize("widths", [(2, 11), (1, 7, 5), (0, 13)], ids=str)
def test_sums_in_blocks_of_features_make_the_same_trees(monkeypatch, widths):
    monkeypatch.setattr(messages, "MOST_ADDITIONS", 900)
    rng = np.random.default_rng(1)
    features = rng.normal(size=(400, 13)).astype(np.float32)
    features[rng.random(features.shape) < 0.1] = np.nan
    label = (np.nansum(features[:, ::3], axis=1) + rng.normal(size=400) > 0).astype(np.float32)
    joined = Joined(features, label, widths)
    params = {**PARAMS, "max_depth": 5, "colsample_bytree": 0.8}
    blocks = []
    honest = PassiveParty._next_sums
    monkeypatch.setattr(PassiveParty, "_next_sums", lambda self: blocks.append(self) or honest(self))
    in_blocks = federate(joined, params, 3, scheme=streamed)
    n_blocks = len(blocks)
    whole = federate(joined, params, 3)
    assert n_blocks > len(blocks) - n_blocks
    assert first_difference(in_blocks.merged(), whole.merged()) == ""


@pytest.mark.parametrize("change", [{"nodes": ()}, {"withheld": (0,)}, {"tree": 1}, {"nodes": (0, 0)}], ids=str)
@pytest.mark.parametrize("guarded", [False, True])
def test_a_later_block_of_other_nodes_is_refused(monkeypatch, change, guarded):
    monkeypatch.setattr(messages, "MOST_ADDITIONS", 1)
    seen = []

    def second(answer):
        if not isinstance(answer, messages.HistogramAnswer):
            return answer
        seen.append(answer)
        return dataclasses.replace(answer, **change) if len(seen) == 2 else answer

    answering(monkeypatch, second)
    joined = data()
    with pytest.raises(ProtocolError, match="sums of other nodes"):
        federate(Joined(joined.features, joined.label, (1, 5)), PARAMS, 1, scheme=streamed, guarded=guarded)


@pytest.mark.parametrize("refused", [False, True])
def test_time_is_hidden_once_a_level_and_when_a_block_is_refused(monkeypatch, refused):
    monkeypatch.setattr(messages, "MOST_ADDITIONS", 1)
    joined, owners, answers = data(), [], []

    def scheme(n_rows: int):
        owners.append(StreamedOwner(pair_format(n_rows)))
        return owners[0], StreamedMaker

    def lie(answer):
        answers.extend([answer] if isinstance(answer, messages.HistogramAnswer) else [])
        is_second = len(answers) == 2 and answers[1] is answer
        return dataclasses.replace(answer, sums=changed(0, 1)(answer.sums)) if is_second else answer

    if refused:
        answering(monkeypatch, lie)
        with pytest.raises(ProtocolError):
            federate(Joined(joined.features, joined.label, (0, 6)), PARAMS, 1, scheme=scheme)
        assert owners[0].calls == ["open", "open", "finish"]
    else:
        federate(Joined(joined.features, joined.label, (0, 6)), PARAMS, 1, scheme=scheme)
        assert owners[0].calls == ["open", "open", "open", "finish"] * 3


def answering(monkeypatch, change):
    """Let passive parties' answers go through ``change``."""
    honest = InProcessLink._answer
    monkeypatch.setattr(InProcessLink, "_answer", lambda self, sent: change(honest(self, sent)))


def nothing_left(answer):
    if isinstance(answer, messages.SplitAnswer):
        return dataclasses.replace(
            answer, goes_left=tuple(messages.Bits.of(np.zeros(1, dtype=bool)) for _ in answer.goes_left)
        )
    return answer


@pytest.mark.parametrize(
    "change",
    [
        nothing_left,
        lambda a: dataclasses.replace(a, tree=9) if isinstance(a, messages.SplitAnswer) else a,
        lambda a: dataclasses.replace(a, tree=9) if isinstance(a, messages.HistogramAnswer) else a,
        lambda a: dataclasses.replace(a, nodes=(4,)) if isinstance(a, messages.HistogramAnswer) else a,
        lambda a: messages.DecisionAnswer(()) if isinstance(a, messages.HistogramAnswer) else a,
        lambda a: messages.DecisionAnswer(()) if isinstance(a, messages.DecisionAnswer) else a,
        lambda a: messages.DecisionAnswer(()) if a is None else a,
    ],
    ids=["rows", "split_tree", "sum_tree", "nodes", "type", "decisions", "begin"],
)
def test_answers_to_other_questions_are_refused(monkeypatch, change):
    answering(monkeypatch, change)
    with pytest.raises(ProtocolError, match="site-"):
        federate(data(with_valid=True), PARAMS, 2)


@pytest.mark.parametrize("request_type", [messages.HistogramRequest, messages.SplitRequest])
def test_a_party_that_fails_within_a_tree_ends_the_job(monkeypatch, request_type):
    calls = []

    def fail(self, request):
        calls.append(type(request))
        if calls.count(request_type) == 3:
            raise JobAborted("site-2 lost its disk")
        return honest(self, request)

    honest = PassiveParty.answer
    monkeypatch.setattr(PassiveParty, "answer", fail)
    with pytest.raises(JobAborted, match="lost its disk"):
        federate(data(), PARAMS, 3)


def test_a_silent_party_runs_into_the_deadline(monkeypatch):
    release = threading.Event()
    answering(monkeypatch, lambda a: release.wait(60) and a)
    with pytest.raises(JobAborted, match="site-2 did not answer"):
        federate(data(), PARAMS, 2, deadline_s=0.3)
    assert not release.is_set()
    release.set()


def test_tables_that_are_not_aligned_are_refused():
    joined = data()
    part = joined.part
    joined.part = lambda party, table: part(party, table)[: 399 if party == 1 else 400]  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="align"):
        federate(joined, PARAMS, 1)


def test_labels_are_checked_before_anything_is_sent(monkeypatch):
    monkeypatch.setattr(InProcessLink, "ask", lambda self, request: pytest.fail("something was sent"))
    joined = data()
    with pytest.raises(DataRefusal) as refused:
        federate(Joined(joined.features, joined.label + 1, joined.widths), PARAMS, 1)
    assert "labels must be" in refused.value.reason


def test_gradients_beyond_their_bounds_are_not_encoded(monkeypatch):
    honest = training.GradientScale
    monkeypatch.setattr(
        training, "GradientScale", lambda bounds, label, weight, pairs: honest(bounds, label, 0.25, pairs)
    )
    with pytest.raises(CapacityExceeded):
        federate(data(), PARAMS, 1)


def asked(monkeypatch) -> list:
    """Return a list that fills with the requests to passive parties."""
    requests = []
    honest = PassiveParty.answer
    monkeypatch.setattr(PassiveParty, "answer", lambda self, request: requests.append(request) or honest(self, request))
    return requests


@pytest.mark.parametrize("n_trees", [1, 3])
def test_nobody_is_asked_for_the_ways_of_training_rows_whose_leaves_are_known(monkeypatch, n_trees):
    requests = asked(monkeypatch)
    params = {**PARAMS, "num_parallel_tree": n_trees, "eval_metric": "logloss"}
    federate(data(with_valid=True), params, 2, evaluate_training=True)
    sets = {request.data_set for request in requests if isinstance(request, messages.DecisionRequest)}
    assert sets == {1}


def test_sums_are_asked_for_in_the_order_of_levels(monkeypatch):
    """A tree's messages to one party: gradients, the root's sums; each level's splits, then its children's sums."""
    requests = asked(monkeypatch)
    joined = data()
    federate(Joined(joined.features, joined.label, (0, 6)), PARAMS, 1)
    assert [type(request).__name__ for request in requests] == [
        *("TreeGradients", "HistogramRequest"),
        *("SplitRequest", "HistogramRequest") * 2,
        "SplitRequest",
    ]


def resumed(first: Outcome, model: bytes, **settings) -> Outcome:
    initial = dataclasses.replace(first, result=dataclasses.replace(first.result, model=model))
    return federate(data(), PARAMS, 3, initial=initial, is_resumed=True, **settings)


def test_a_checkpoint_of_a_followed_xgboost_is_gone_on_with():
    """Up to 0.9 the active party's own XGBoost wrote it: without names, in the fields that it writes."""
    first = federate(data(), PARAMS, 3)
    booster = xgb.Booster(model_file=bytearray(first.result.model))
    booster.feature_names = booster.feature_types = None
    whole = federate(data(), PARAMS, 6)
    for checkpoint in (bytes(booster.save_raw("json")), first.result.model):
        assert first_difference(resumed(first, checkpoint).merged(), whole.merged()) == ""


def test_rounds_of_another_arithmetic_are_not_gone_on_with():
    first = federate(data(), PARAMS, 3)
    other = "3.4" if xgb.__version__.startswith("3.2") else "3.2"
    with pytest.raises(ConfigurationError, match=rf"go on in that of {other}: install the XGBoost of then"):
        resumed(first, first.result.model, arithmetic=other)


@pytest.mark.parametrize(
    "params", [{"objective": "reg:absoluteerror"}, {"objective": "reg:quantileerror", "quantile_alpha": 0.4}]
)
@pytest.mark.parametrize("arithmetic", ["3.2", "3.3", "3.4"])
def test_every_arithmetic_grows_trees_on_every_wheel(arithmetic, params):
    """Leaves that are quantiles up to 3.3, gradients of smooth losses from 3.4 on, whose hessians are larger."""
    params = {**params, "max_depth": 3}
    joined = data()
    label = joined.features[:, 0] * 3 + joined.features[:, 4]
    outcome = federate(Joined(joined.features, label, joined.widths), params, 4, arithmetic=arithmetic)
    document = json.loads(outcome.merged())
    assert document["version"][:2] == [int(part) for part in arithmetic.split(".")]
    assert np.abs(outcome.predict(joined, 0) - label).mean() < 0.7 * np.abs(label - np.median(label)).mean()
