"""The vertical catalogue against traces of three real ranks, and against messages it must refuse."""

from __future__ import annotations

import dataclasses

import pytest

from he_processors.errors import ProtocolError
from nvflare_plugins.wire.catalogue import Phase, TrainingStep
from nvflare_plugins.wire.vertical_catalogue import VerticalGrammar, VerticalKind, VerticalShape
from nvflare_plugins.xgb.parameters import check_parameters
from nvflare_plugins.xgb.versions import known_release
from tests.support import recorder, vertical_recorder

TRACES = recorder.traces("vertical")
KNOWN = [name for name in TRACES if not name.startswith("synchronized")]
PHASES = {"setup": Phase.SETUP, "update": Phase.UPDATE, "evaluate": Phase.EVALUATE}


def shape_of(trace: dict) -> VerticalShape:
    case = {"max_bin": 16, "max_depth": 3, **trace["case"]}
    continued = case.pop("continued", False)
    case.pop("debug_synchronize", None)
    params = check_parameters(case, [f"f{i}" for i in range(recorder.N_FEATURES)])
    n_outputs, parallel = params.objective.n_outputs, case.get("num_parallel_tree", 1)
    return VerticalShape(
        recorder.WORLD,
        (recorder.N_ROWS, vertical_recorder.N_VALID),
        n_outputs,
        n_outputs * parallel,
        params.objective.adaptive_leaf,
        not continued and "base_score" not in case,
        continued,
        parallel > 1,
        (0, 1),
        len(params.metrics),
        known_release(trace["xgboost"]).sends_column_seed,
    )


def replay(trace: dict, phases: list | None = None) -> list:
    grammar, messages, number = VerticalGrammar(shape_of(trace)), [], 0
    for phase, number, calls in phases if phases is not None else trace["phases"]:
        if phase != "setup":
            grammar.enter(TrainingStep(PHASES[phase], number))
        messages += [grammar.classify(*call) for call in calls]
    grammar.enter(TrainingStep(Phase.FINISH, number + 1))
    return messages


@pytest.mark.parametrize("name", KNOWN)
def test_every_recorded_message_is_known(name):
    kinds = [message.kind for message in replay(TRACES[name])]
    assert kinds.count(VerticalKind.GRADIENTS) == vertical_recorder.ROUNDS
    assert kinds.count(VerticalKind.ENTRIES) == kinds.count(VerticalKind.ENTRY_COUNT) > 0
    assert kinds.count(VerticalKind.ROW_DECISIONS) == kinds.count(VerticalKind.ROW_MISSING)
    # XGBoost's first estimate for this objective leaves nothing to split on these labels.
    assert (VerticalKind.ROW_DECISIONS in kinds) == (not name.startswith("pseudo_huber"))


@pytest.mark.parametrize("name", KNOWN)
def test_no_recorded_message_is_longer_than_the_shape_says(name):
    shape = shape_of(TRACES[name])
    nodes = 15 * shape.trees_per_round * (vertical_recorder.ROUNDS + 1)
    largest = VerticalGrammar(dataclasses.replace(shape, most_nodes=nodes)).largest_message_bytes
    assert max(call[3] for _, _, calls in TRACES[name]["phases"] for call in calls) <= largest <= 4 << 20


def test_kinds_and_reply_sizes_of_a_first_round():
    messages = replay(TRACES["logistic"])[6:24]
    k = VerticalKind
    assert [m.kind for m in messages] == [
        k.FEATURE_COUNT,
        k.ERROR_LENGTH,
        k.VALUE_LENGTH,
        k.BASE_SCORE,
        k.MODEL_PARAMETERS,
        k.ERROR_LENGTH,
        k.VALUE_LENGTH,
        k.GRADIENTS,
        k.SAMPLER_SEED,
        k.SKETCH_COLUMNS,
        k.ENTRY_COUNT,
        k.ENTRY_SIZES,
        k.ENTRY_BYTES,
        k.ENTRIES,
        k.ROW_DECISIONS,
        k.ROW_MISSING,
        k.ENTRY_COUNT,
        k.ENTRY_SIZES,
    ]
    assert [m.reply_size for m in messages[:10]] == [4, 0, 0, 0, 0, 0, 0, 0, 0, 4]
    assert [m.reply_size for m in messages[10:13]] == [24, 24, 24] and messages[17].reply_size == 48
    assert [m.reply_size for m in messages[14:16]] == [38, 38]


def _accepts(trace: dict, phases: list) -> bool:
    try:
        replay(trace, phases)
    except ProtocolError:
        return False
    return True


@pytest.mark.parametrize("name", ["logistic", "absolute_error_forest", "continued"])
def test_any_single_change_of_a_trace_is_refused(name):
    """Another call, type or operation, and sizes outside a kind's own range; rows and gradients to the byte."""
    trace = TRACES[name]
    accepted = []
    for p, (phase, number, calls) in enumerate(trace["phases"]):
        for c, (call, dtype, op, size) in enumerate(calls):
            changes = [["Broadcast" if call == "Allgather" else "Allgather", dtype, op, size + 1]]
            if call == "Allreduce":
                changes += [[call, 2, op, size], [call, dtype, 1, size]]
            if (call == "Broadcast" and size > 1000) or ((dtype, op) == (8, 4) and phase == "update" and c > 4):
                changes.append([call, dtype, op, size - 1])
            for changed in changes:
                mutated = [*calls[:c], changed, *calls[c + 1 :]]
                phases = [*trace["phases"][:p], [phase, number, mutated], *trace["phases"][p + 1 :]]
                accepted += [changed] * _accepts(trace, phases)
    assert not accepted


@pytest.mark.parametrize("name", ["logistic", "absolute_error"])
def test_a_dropped_message_is_noticed(name):
    trace = TRACES[name]
    for p, (phase, number, calls) in enumerate(trace["phases"]):
        for c, (call, _, _, size) in enumerate(calls):
            if (call, size) == ("Allreduce", 38) or (phase == "evaluate" and call == "Allreduce"):
                continue  # whole blocks may be absent; halves of them are noticed by the next message
            phases = [*trace["phases"][:p], [phase, number, [*calls[:c], *calls[c + 1 :]]], *trace["phases"][p + 1 :]]
            assert not _accepts(trace, phases), (phase, number, c)


def test_trees_are_not_broadcast():
    with pytest.raises(ProtocolError, match="unknown message"):
        replay(TRACES["synchronized"])


def test_feature_names_are_not_sent():
    grammar = VerticalGrammar(shape_of(TRACES["logistic"]))
    for call in TRACES["logistic"]["phases"][0][2]:
        grammar.classify(*call)
    with pytest.raises(ProtocolError):
        grammar.classify("AllgatherV", 0, 0, 40)


def test_a_sketch_of_values_is_refused():
    """What a QuantileDMatrix would send in column split: sketches of different columns."""
    grammar = VerticalGrammar(shape_of(TRACES["logistic"]))
    with pytest.raises(ProtocolError):
        grammar.classify("Allreduce", 11, 0, 8)
