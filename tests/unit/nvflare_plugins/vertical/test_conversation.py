"""Conversations between sites: questions are answered in order, and failures are clear errors at every site."""

from __future__ import annotations

import dataclasses
import errno
import threading
import time

import pytest

from he_processors.errors import ProtocolError
from nvflare_plugins.base.errors import JobAborted, time_mends
from nvflare_plugins.kinds.vertical.conversation import FlowControl, Responder
from tests.support.conversations import PACE, PATIENCE_S, Site, answering, ask_once, asking, converse, end_of, shout
from tests.support.threads import wait_until


def steps_pass(site: Site, until: int) -> None:
    """Wait until the site has taken so many steps."""
    wait_until(lambda: site.channel.counter >= until, PATIENCE_S, lambda: "the conversation stands still")


def test_questions_to_several_sites_are_answered_in_order():
    def lead(site: Site):
        with asking(site) as talk:
            futures = [talk.ask(rank, f"{rank} {i}".encode()) for i in range(20) for rank in (1, 2)]
            first = [future.result(PATIENCE_S) for future in futures]
            return [*first, talk.ask(2, b"again").result(PATIENCE_S)]

    results = converse([lead, answering(shout), answering(lambda q: q + b"!")])
    assert results[0] == [x for i in range(20) for x in (f"1 {i}".encode(), f"2 {i}!".encode())] + [b"again!"]
    assert results[1:] == [None, None]


@pytest.mark.parametrize("expected", [1000, 5000])
def test_answers_may_be_as_long_as_is_expected_of_their_site(expected):
    """Before that, as long as an introduction; what other sites may send does not matter."""
    short = dataclasses.replace(PACE, message_bytes=100)

    def lead(site: Site):
        with asking(site, pace=short) as talk:
            talk.ask(1, b"hello").result(PATIENCE_S)
            talk.expect(1, expected)
            talk.expect(2, 10**6)
            return len(talk.ask(1, b"more").result(PATIENCE_S))

    results = converse([lead, answering(lambda q: q * (1 if q == b"hello" else 1000)), answering(shout)])
    if expected < 4000:
        assert isinstance(results[0], ProtocolError) and "too long" in str(results[0])
    else:
        assert results[0] == 4000


def test_a_defect_in_reading_an_answer_wakes_whoever_waits_for_it():
    def defect(answer: bytes) -> None:
        raise RuntimeError(answer.decode())

    def lead(site: Site):
        with asking(site) as talk:
            with pytest.raises(JobAborted, match="unexpected RuntimeError") as caught:
                talk.ask(1, b"secret", defect).result(PATIENCE_S)
            assert "secret" not in str(caught.value).lower()
            raise caught.value

    results = converse([lead, answering(shout)])
    assert "unexpected RuntimeError" in str(results[0])


def test_messages_far_larger_than_a_frame_travel_in_bounded_frames():
    seen: list = []
    big = bytes(range(256)) * 16000  # 4 MB, frames of 1 MiB
    pace = FlowControl(1 << 20, 1 << 12, 1 << 23, 1 << 23, 0.2)

    def lead(site: Site):
        with asking(site, pace=pace) as talk:
            return talk.ask(1, big).result(PATIENCE_S), talk.ask(1, b"").result(PATIENCE_S)

    results = converse([lead, answering(lambda q: q[::-1], pace=pace)], seen=seen)
    assert results[0] == (big[::-1], b"")
    assert max(len(frame) for _, frame in seen) < (1 << 20) + 2000


def test_computing_overlaps_with_questions_that_follow():
    """Under MORE, further questions arrive while the first is still being answered."""
    arrived = threading.Event()

    def answer(question: bytes) -> bytes:
        if question[:1] == b"0":
            assert arrived.wait(PATIENCE_S)
        return question[:1]

    def lead(site: Site):
        with asking(site) as talk:
            opened = site.channel.counter
            futures = []
            for number in (b"0", b"1"):
                futures.append(talk.ask(1, number + bytes(5000)))
                steps_pass(site, opened + len(futures))
            arrived.set()
            return [future.result(PATIENCE_S) for future in futures]

    assert converse([lead, answering(answer)])[0] == [b"0", b"1"]


def test_what_is_asked_together_and_answered_in_a_moment_takes_two_steps():
    patient = dataclasses.replace(PACE, patience_s=PATIENCE_S, linger_s=PATIENCE_S)

    def lead(site: Site):
        with asking(site, pace=patient) as talk:
            before, steps = site.channel.counter, []
            for _ in range(5):
                futures = [talk.ask(rank, b"q") for rank in (1, 2) for _ in range(3)]
                talk.flush()
                assert [future.result(PATIENCE_S) for future in futures] == [b"Q"] * 6
                steps.append(site.channel.counter - before)
            return steps

    results = converse([lead, answering(shout, pace=patient), answering(shout, pace=patient)])
    assert results[0] == [2, 4, 6, 8, 10]


def test_an_answer_travels_while_the_next_one_is_computed():
    """Although nobody waits for it at the asking site, which is busy with something else."""
    came = threading.Event()

    def answer(question: bytes) -> bytes:
        if question == b"slow":
            assert came.wait(PATIENCE_S)
        return question

    def note(answer: bytes) -> bytes:
        came.set()
        return answer

    def lead(site: Site):
        with asking(site, pace=lingering) as talk:
            futures = [talk.ask(1, b"fast", note), talk.ask(1, b"slow")]
            talk.flush()
            assert came.wait(PATIENCE_S)
            return [future.result(PATIENCE_S) for future in futures]

    lingering = dataclasses.replace(PACE, patience_s=PATIENCE_S, linger_s=0.01)
    assert converse([lead, answering(answer, pace=lingering)])[0] == [b"fast", b"slow"]


def test_time_without_questions_is_used_and_a_question_is_answered_first():
    order: list = []
    reached = threading.Event()

    def idle() -> bool:
        order.append("idle")
        if len(order) >= 5:
            reached.set()
        return len(order) < 5

    def lead(site: Site):
        with asking(site) as talk:
            assert reached.wait(PATIENCE_S)
            return [talk.ask(1, b"a").result(PATIENCE_S), talk.ask(1, b"b").result(PATIENCE_S)]

    def task(site: Site):
        Responder(end_of(site), 0, shout, idle=idle).run()

    assert converse([lead, task]) == [[b"A", b"B"], None]
    assert 5 <= len(order) <= 8  # once more after each answer


def test_a_defect_in_idle_work_ends_the_conversation():
    def idle() -> bool:
        raise KeyError("row 17 of Alice")

    def task(site: Site):
        Responder(end_of(site), 0, shout, idle=idle).run()

    results = converse([ask_once, task])
    assert all(isinstance(r, JobAborted) and "KeyError" in str(r) and "Alice" not in str(r) for r in results)


def test_answers_that_nobody_takes_make_the_answering_site_wait():
    """Memory is bounded at both sides: some answers wait here, some there, and the rest are not made."""
    made: list = []

    def answer(question: bytes) -> bytes:
        made.append(question)
        return bytes(1 << 14)

    def lead(site: Site):
        with asking(site, pace=narrow) as talk:
            futures = [talk.ask(1, b"q") for _ in range(40)]
            talk.flush()
            wait_until(lambda: len(made) >= 4, PATIENCE_S)
            time.sleep(0.3)
            n_made = len(made)
            assert [len(future.result(PATIENCE_S)) for future in futures] == [1 << 14] * 40
            return n_made

    narrow = dataclasses.replace(PACE, frame_bytes=1 << 15, queue_bytes=1 << 16, linger_s=0.01, patience_s=PATIENCE_S)
    results = converse([lead, answering(answer, pace=narrow)])
    assert 4 <= results[0] < 20 and len(made) == 40


def test_turns_pass_at_the_same_step_and_after_all_answers():
    turns: list = [[], [], []]
    order: list = []

    def answer(question: bytes) -> bytes:
        order.append(question)
        return b""

    def on_turn(turn: int) -> None:
        order.append(turn)

    def lead(site: Site):
        with asking(site, turns[0]) as talk:
            for number in range(1, 4):
                talk.ask(1, b"q").result(PATIENCE_S)
                talk.turn(number)
            talk.turn(6)

    class Order(list):
        append = staticmethod(on_turn)

    results = converse([lead, answering(answer, Order()), answering(shout, turns[2])])
    assert results == [None] * 3
    assert turns[0] == turns[2] == [0, 1, 2, 3, 4, 5]
    assert order == [b"q", 0, b"q", 1, b"q", 2, 3, 4, 5]


def test_a_slow_site_is_waited_for_beyond_the_deadline_of_an_exchange():
    """While it works on one answer, the sites meet again and again: no exchange is long."""
    may_answer = threading.Event()

    def answer(question: bytes) -> bytes:
        assert may_answer.wait(PATIENCE_S)
        return question

    def lead(site: Site):
        with asking(site, pace=quick) as talk:
            asked, before = talk.ask(1, b"slow"), site.channel.counter
            threading.Thread(target=lambda: (steps_pass(site, before + 10), may_answer.set()), daemon=True).start()
            return asked.result(PATIENCE_S)

    quick = dataclasses.replace(PACE, patience_s=0.02)
    assert converse([lead, answering(answer, pace=quick)]) == [b"slow", None]


def test_work_that_hangs_keeps_the_others_waiting_no_longer_than_it_may():
    """The thread of the conversation goes on, whatever becomes of the work that asks."""
    impatient = dataclasses.replace(PACE, patience_s=0.05, idle_s=0.4)

    def lead(site: Site):
        with asking(site, pace=impatient) as talk:
            talk.ask(1, b"a").result(PATIENCE_S)
            talk._thread.join(PATIENCE_S)  # as work that hangs does until the site's watch ends it
            talk.ask(1, b"b")

    results = converse([lead, answering(shout, pace=impatient), answering(shout)])
    assert all(isinstance(r, JobAborted) and "the work of site-1 has asked nothing for" in str(r) for r in results)


def test_work_that_waits_or_asks_does_not_hang():
    quiet = dataclasses.replace(PACE, patience_s=PATIENCE_S)  # its own thread does not look meanwhile

    def lead(site: Site):
        talk = asking(site, pace=quiet)
        with talk:
            long_ago = time.monotonic() - 2 * PACE.idle_s
            talk._worked_at = long_ago
            asked = talk.ask(1, b"a")
            talk._worked_at = long_ago
            talk._check_work()  # its answer is waited for
            asked.result(PATIENCE_S)
            talk._check_work()
            talk._worked_at = long_ago
            talk.turn(1)
            talk._check_work()
        talk._worked_at = long_ago
        talk._check_work()  # it has ended

    assert converse([lead, answering(shout)]) == [None, None]


def test_whoever_does_not_answer_in_time_is_a_timeout_and_ends_all():
    release = threading.Event()

    def answer(question: bytes) -> bytes:
        release.wait(PATIENCE_S)
        return question

    def lead(site: Site):
        with asking(site) as talk:
            return talk.ask(1, b"never").result(0.5)

    results = converse([lead, answering(answer), answering(shout)])
    release.set()
    assert isinstance(results[0], TimeoutError) and isinstance(results[2], JobAborted)


def test_an_answer_that_fails_ends_the_conversation_everywhere_with_its_reason():
    def answer(question: bytes) -> bytes:
        raise ProtocolError("the ciphertext is not one")

    results = converse([ask_once, answering(answer), answering(shout)])
    assert isinstance(results[1], ProtocolError) and "not one" in str(results[1])
    for rank in (0, 2):
        assert isinstance(results[rank], JobAborted) and "site-2: the ciphertext is not one" in str(results[rank])


def test_a_defect_while_answering_quotes_nothing():
    def answer(question: bytes) -> bytes:
        raise KeyError("row 17 of Alice")

    results = converse([ask_once, answering(answer)])
    assert all(isinstance(r, JobAborted) and "KeyError" in str(r) and "Alice" not in str(r) for r in results)


def test_an_error_of_the_asking_side_ends_the_others():
    def lead(site: Site):
        with asking(site) as talk:
            talk.ask(1, b"x").result(PATIENCE_S)
            raise ProtocolError("sums do not fit")

    results = converse([lead, answering(shout), answering(shout)])
    assert isinstance(results[0], ProtocolError)
    assert all(isinstance(r, JobAborted) and "sums do not fit" in str(r) for r in results[1:])


def test_nothing_can_be_asked_after_the_end():
    def lead(site: Site):
        with asking(site) as talk:
            talk.ask(1, b"x").result(PATIENCE_S)
        return talk

    talk = converse([lead, answering(shout)])[0]
    with pytest.raises(JobAborted):
        talk.ask(1, b"y")


def full(*of: object) -> bytes:
    raise OSError(errno.ENOSPC, "full", "/srv/secret")


def test_a_full_disk_at_the_answering_side_is_what_time_mends():
    results = converse([ask_once, answering(full)])
    assert all(isinstance(one, JobAborted) and "secret" not in str(one) for one in results)
    assert [time_mends(one) for one in results] == [False, True]


def test_a_full_disk_at_the_asking_side_is_what_time_mends():
    def lead(site: Site):
        site.channel.route = full
        with asking(site) as talk:
            talk.ask(1, b"x").result(PATIENCE_S)

    results = converse([lead, answering(shout)])
    assert [time_mends(one) for one in results] == [True, False]
