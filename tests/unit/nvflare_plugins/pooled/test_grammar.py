"""The catalogue against traces of real XGBoost runs, and against messages it must refuse."""

from __future__ import annotations

import dataclasses
import json

import pytest

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.cli.main import main
from nvflare_plugins.pooled.mediated.grammar import HorizontalGrammar, TrainingShape
from nvflare_plugins.pooled.mediated.training import training_shape
from nvflare_plugins.wire.envelope import Kind, Phase, TrainingStep
from nvflare_plugins.xgb.parameters import check_parameters
from nvflare_plugins.xgb.versions import known_release
from tests.support import recorder

TRACES = recorder.traces()
PHASES = {"update": Phase.UPDATE, "evaluate": Phase.EVALUATE}


def shape_of(trace: dict) -> TrainingShape:
    case = {"max_bin": recorder.MAX_BIN, "max_depth": 3, **trace["case"]}
    weighted, continued = case.pop("weighted", False), case.pop("continued", False)
    params = check_parameters(case, [f"f{i}" for i in range(recorder.N_FEATURES)])
    shape = training_shape(
        params,
        recorder.WORLD,
        recorder.N_FEATURES,
        trace["n_bins"],
        weighted=weighted,
        n_eval_sets=1,
        continued=continued,
    )
    return dataclasses.replace(shape, column_seed=known_release(trace["xgboost"]).sends_column_seed)


def replay(grammar: HorizontalGrammar, trace: dict) -> list[Kind]:
    kinds = []
    for phase, number, calls in trace["phases"]:
        grammar.enter(TrainingStep(PHASES[phase], number))
        kinds += [grammar.classify(*call).kind for call in calls]
    grammar.enter(TrainingStep(Phase.FINISH, number + 1))
    return kinds


@pytest.mark.parametrize("name", TRACES)
def test_every_recorded_message_is_known(name):
    kinds = replay(HorizontalGrammar(shape_of(TRACES[name])), TRACES[name])
    assert kinds.count(Kind.HISTOGRAM) > 0
    trees = recorder.ROUNDS * shape_of(TRACES[name]).trees_per_round
    assert kinds.count(Kind.ROOT_SUM) == trees


@pytest.mark.parametrize("name", TRACES)
def test_no_recorded_message_is_longer_than_the_shape_says(name):
    largest = HorizontalGrammar(shape_of(TRACES[name])).largest_message_bytes
    assert max(call[3] for _, _, calls in TRACES[name]["phases"] for call in calls) <= largest <= 4 << 20


def test_kinds_of_a_logistic_round_in_order():
    kinds = replay(HorizontalGrammar(shape_of(TRACES["logistic"])), TRACES["logistic"])
    assert kinds[:10] == [
        Kind.FEATURE_COUNT,
        Kind.ROW_COUNT,
        Kind.LABEL_MEAN,
        Kind.MODEL_PARAMETERS,
        Kind.SAMPLER_SEED,
        Kind.HISTOGRAM,
        Kind.ROOT_SUM,
        Kind.HISTOGRAM,
        Kind.HISTOGRAM,
        Kind.METRIC_SIZE,
    ]


@pytest.mark.parametrize("name", ["logistic", "vector_leaf", "absolute_error", "softprob"])
def test_any_single_change_of_a_trace_is_refused(name):
    """Drop, repeat or alter each call in turn: the state machine must notice by the end of the trace."""
    trace = TRACES[name]
    n_accepted = 0
    for phase_index, (_, _, calls) in enumerate(trace["phases"]):
        for position, call in enumerate(calls):
            changed_calls = {
                "dtype": [call[0], 8, call[2], call[3]],
                "op": [call[0], call[1], 1, call[3]],
                "size": [call[0], call[1], call[2], call[3] + 1],
                "call": ["AllgatherV", *call[1:]],
            }
            for what, changed in changed_calls.items():
                if call[0] == "Broadcast" and what in ("dtype", "op", "size"):
                    continue  # a broadcast has neither, and rank 0's length is free
                mutated = [*calls[:position], changed, *calls[position + 1 :]]
                n_accepted += _accepts(trace, phase_index, mutated)
    assert n_accepted == 0


def test_a_missing_root_or_leaf_message_is_noticed():
    for name, dropped_kind in (("logistic", Kind.ROOT_SUM), ("absolute_error", Kind.LEAF_QUANTILE)):
        trace = TRACES[name]
        grammar = HorizontalGrammar(shape_of(trace))
        grammar.enter(TrainingStep(Phase.UPDATE, 0))
        with pytest.raises(ProtocolError):
            for call in trace["phases"][0][2]:
                probe = HorizontalGrammar(shape_of(trace))
                probe.__dict__.update(grammar.__dict__ | {"_queue": list(grammar._queue)})
                if probe.classify(*call).kind is dropped_kind:
                    continue
                grammar.classify(*call)
            grammar.enter(TrainingStep(Phase.EVALUATE, 0))


def _accepts(trace: dict, phase_index: int, calls: list) -> bool:
    phases = [list(p) for p in trace["phases"]]
    phases[phase_index][2] = calls
    try:
        replay(HorizontalGrammar(shape_of(trace)), {**trace, "phases": phases})
    except ProtocolError:
        return False
    return True


def test_sketches_gradient_broadcasts_and_unknown_calls_are_refused():
    grammar = HorizontalGrammar(shape_of(TRACES["logistic"]))
    grammar.enter(TrainingStep(Phase.UPDATE, 0))
    for call in (
        ["Allreduce", 1, 2, 71088],
        ["Allreduce", 11, 2, 312],
        ["Broadcast", 0, 0, 2400],
        ["Allgather", 0, 0, 8],
    ):
        with pytest.raises(ProtocolError, match="unknown message"):
            grammar.classify(*call)


def test_nothing_may_come_before_the_first_phase():
    grammar = HorizontalGrammar(shape_of(TRACES["logistic"]))
    with pytest.raises(ProtocolError):
        grammar.classify("Allreduce", 10, 0, 4)


def test_rounds_do_not_go_backwards():
    grammar = HorizontalGrammar(shape_of(TRACES["logistic"]))
    grammar.enter(TrainingStep(Phase.FINISH, 3))
    with pytest.raises(ProtocolError):
        grammar.enter(TrainingStep(Phase.UPDATE, 2))


def test_more_nodes_than_a_level_can_have_are_refused():
    trace = TRACES["logistic"]
    shape = dataclasses.replace(shape_of(trace), max_built_nodes=2)
    grammar = HorizontalGrammar(shape)
    grammar.enter(TrainingStep(Phase.UPDATE, 0))
    for call in trace["phases"][0][2][:7]:
        grammar.classify(*call)
    with pytest.raises(ProtocolError):
        grammar.classify("Allreduce", 2, 2, 3 * 16 * shape.n_bins)


@pytest.mark.slow
def test_the_wheel_still_says_what_was_recorded():
    for name in ("logistic", "softprob", "absolute_error", "continued"):
        recorded = json.loads(json.dumps(recorder.record(recorder.CASES[name])))
        assert recorded == TRACES[recorder.installed_name(name)]


# Tables so wide that XGBoost could not hand over a level's histograms are refused before they are summed.


DEEP: dict[str, object] = {"objective": "binary:logistic", "max_depth": 10}


def test_training_refuses_them() -> None:
    most = ((1 << 31) - 1 - 1024) // (16 * 256)
    training_shape(check_parameters(DEEP, ["a"]), 3, 1, most, weighted=False, n_eval_sets=0, continued=False)
    with pytest.raises(ConfigurationError, match=rf"those of 256 nodes .* 2 GiB, which is {most:,} bins.*max_bin"):
        training_shape(check_parameters(DEEP, ["a"]), 3, 1, most + 1, weighted=False, n_eval_sets=0, continued=False)
    one_by_one = check_parameters({**DEEP, "grow_policy": "lossguide"}, ["a"])
    training_shape(one_by_one, 3, 1, most + 1, weighted=False, n_eval_sets=0, continued=False)


def test_a_plan_refuses_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--rows", "100000", "--features", "3000", "--depth", "10"]) == 1
    assert "in one message of at most 2 GiB" in capsys.readouterr().err
