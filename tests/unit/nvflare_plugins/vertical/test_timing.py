"""Where the time of a round goes: sums and spans of stages, and few spans however long a round is."""

from __future__ import annotations

import time

from nvflare_plugins.kinds.vertical.context import MOST_SPANS, Stages, joined
from tests.support.threads import in_threads


def test_stages_of_several_threads_add_up_and_begin_anew_with_each_round():
    stages = Stages()

    def work() -> None:
        with stages.measure("prepare"):
            time.sleep(0.02)

    with stages.measure("encrypt"):
        in_threads(lambda _: work(), range(2))
    times = stages.take()
    assert times.stages["prepare"] >= 0.04 and times.seconds >= times.stages["encrypt"] >= 0.02
    assert [stage for stage, _, _ in times.spans] == ["encrypt", "prepare", "prepare"]
    assert all(0 <= begin < end <= times.seconds for _, begin, end in times.spans)
    again = stages.take()
    assert (again.stages, again.spans) == ({}, ())


def test_a_stage_that_began_in_the_round_before_begins_with_this_one():
    stages = Stages()
    with stages.measure("receive"):
        time.sleep(0.002)
        stages.take()
        time.sleep(0.002)
    [(stage, begin, end)] = stages.take().spans
    assert (stage, begin) == ("receive", 0.0) and end >= 0.002


def test_many_spans_become_few_and_cover_the_same_time():
    spans = [(stage, i + shift, i + shift + 0.4) for i in range(2000) for stage, shift in (("a", 0.0), ("b", 0.5))]
    found = joined(spans)
    assert 2 <= len(found) <= MOST_SPANS
    assert min(begin for _, begin, _ in found) == 0 and max(end for _, _, end in found) == 1999.9
    assert found == tuple(sorted(found, key=lambda span: span[1]))
    few = (("a", 0.0, 1.0), ("b", 0.5, 2.0))
    assert joined(few) == few
    many_stages = [(str(i), float(i), i + 1.0) for i in range(300)]
    assert joined(many_stages) == tuple(many_stages)  # nothing to join: it ends all the same
