"""A protocol number stands for the same messages and arithmetic for ever: what changes them has another number."""

from __future__ import annotations

import copy

import pytest

from nvflare_plugins.site.protocols import PROTOCOLS, Span
from tests.golden.protocols import ALL, changed, parts, record

REMEDY = (
    "Where the change is meant, raise the number of these kinds in nvflare_plugins/site/protocols.py, keep the number "
    "before in its range if this release still speaks it, and run `python -m tests.golden.protocols`"
)


def test_what_the_numbers_stand_for_is_as_it_was_recorded() -> None:
    numbers, recorded = record()
    now = parts()
    wrong = changed(recorded, now, numbers)
    assert not wrong, "\n".join([REMEDY, *wrong[:20]])
    assert {kind: PROTOCOLS[kind].most for kind in ALL} == numbers, "run `python -m tests.golden.protocols`"
    assert now == recorded, "new parts are not recorded: run `python -m tests.golden.protocols`"


def test_every_kind_has_vectors_models_and_defaults() -> None:
    _, recorded = record()
    for kind in ALL:
        names = [name for group, digests in recorded.items() if kind in group.split() for name in digests]
        assert {"model", "default", "sessions", "frames", "sums"} <= {name.partition(":")[0] for name in names}, kind


@pytest.mark.parametrize("what", ["model: bagging/model.json", "default: num_rounds", "parties: tree"])
@pytest.mark.parametrize("gone", [True, False])
def test_what_changes_or_vanishes_is_noticed_until_the_number_rises(what, gone, monkeypatch) -> None:
    numbers, recorded = record()
    now = copy.deepcopy(recorded)
    name = next(name for name in now["bagging"] if name.startswith(what))
    if gone:
        del now["bagging"][name]
    else:
        now["bagging"][name] = "0" * 16
    assert changed(recorded, now, numbers) == [f"{name}, of protocol 1 of bagging"]
    monkeypatch.setitem(PROTOCOLS, "bagging", Span(1, 2))
    assert changed(recorded, now, numbers) == []


def test_what_all_kinds_send_raises_the_number_of_all(monkeypatch) -> None:
    numbers, recorded = record()
    now = copy.deepcopy(recorded)
    group = " ".join(ALL)
    name = next(name for name in now[group] if name.startswith("frames"))
    now[group][name] = "0" * 16
    assert len(changed(recorded, now, numbers)) == 1
    for kind in ALL[1:]:
        monkeypatch.setitem(PROTOCOLS, kind, Span(1, 2))
    assert changed(recorded, now, numbers) == [f"{name}, of protocol 1 of {ALL[0]}"]


def test_what_is_new_changes_no_number() -> None:
    numbers, recorded = record()
    now = copy.deepcopy(recorded)
    now["bagging"]["default: a_new_field"] = "0" * 16
    assert changed(recorded, now, numbers) == []
