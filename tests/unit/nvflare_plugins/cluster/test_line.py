"""A line between two ends of a socket pair: what arrives, what is refused, how waiting ends."""

from __future__ import annotations

import contextlib
import io
import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nvflare_plugins.workers import worker_connection
from nvflare_plugins.workers.worker_connection import DONE, PartHost, WorkerLine, serve
from nvflare_plugins.workers.workers import TRIAL
from tests.support.examples import examples

ARRAYS = hnp.arrays(
    st.sampled_from(["?", "<i8", "<f8", "<f4", "<u8", "|u1"]), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | ARRAYS,
    lambda one: st.lists(one) | st.tuples(one, one) | st.dictionaries(st.text(), one),
    max_leaves=8,
)


class _GaveUp(Exception):
    pass


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def over_a_line(content: Any) -> Any:
    with pair() as (here, there):
        sender = threading.Thread(target=WorkerLine(here).send, args=(content,))
        sender.start()
        received = WorkerLine(there).receive()
        sender.join()
    return received


def require_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
        assert one.flags.f_contiguous == other.flags.f_contiguous or not one.size
        assert other.flags.writeable
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            require_same(a, b)
    elif isinstance(one, dict):
        require_same(list(one.items()), list(other.items()))
    else:
        assert one == other


@given(PLAIN)
def test_plain_values_arrive_as_they_were(content: Any) -> None:
    require_same(content, over_a_line(content))


def test_long_values_arrive_as_they_were_in_their_order() -> None:
    array = np.arange(300_000, dtype=np.float64).reshape(300, 1000)
    content = (b"a" * 1_000_000, [array, array.T, array[:, ::7].copy()], {"b": b"b" * 4095, "c": b"c" * 4096}, array)
    require_same(content, over_a_line(content))


def test_a_view_arrives_as_an_array_of_its_own() -> None:
    received = over_a_line(np.arange(20)[::2])
    assert received.tolist() == list(range(0, 20, 2)) and received.flags.c_contiguous


@pytest.mark.parametrize("hostile", [print, PartHost, np.dtype("f8"), OSError("text")])
def test_a_form_that_would_load_code_is_refused(hostile: object) -> None:
    form = pickle.dumps(("call", hostile), protocol=5)
    with pair() as (here, there), pytest.raises(pickle.UnpicklingError):
        here.sendall(struct.pack("<Q", len(form)) + form)
        WorkerLine(there).receive()


def sent(content: Any) -> bytes:
    with pair() as (here, there):
        WorkerLine(here).send(content)
        return there.recv(1 << 20)


WHOLE = sent(("done", [np.arange(12.0).reshape(3, 4), b"x" * 5000, {"größe": 1.5}], (np.arange(9, dtype=np.int8), "")))


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.integers(struct.calcsize("<Q"), 220), st.integers(0, 255)), min_size=1, max_size=4))
def test_whatever_arrives_is_an_answer_or_a_lost_line(changed: list[tuple[int, int]]) -> None:
    raw = bytearray(WHOLE)
    for place, value in changed:
        raw[place] = value
    with pair() as (here, there):
        here.sendall(raw)
        here.close()
        with contextlib.suppress(OSError, pickle.UnpicklingError, MemoryError):
            WorkerLine(there).receive()


class _Named(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value[1] if type(value) is tuple and value[0] == "named" else None


@pytest.mark.parametrize(
    "name",
    [
        *(-1, True, 1 << 70, "x", (), ("<f8", 3, False), ("<f8", (0.5,), False), ([("a", "O")], (1,), False)),
        *((dtype, (2,), False) for dtype in ("O", "V8", "M8[s]", "S3", "U3", "i4,O", "nonsense")),
        *(("<f8", shape, False) for shape in ((-1,), (-1, -5), (1 << 62, 0), (1 << 62, 1 << 62))),
    ],
    ids=str,
)
def test_only_arrays_of_numbers_of_a_shape_are_received(name: object) -> None:
    form = io.BytesIO()
    _Named(form, 5).dump(("named", name))
    with pair() as (here, there), pytest.raises(pickle.UnpicklingError):
        here.sendall(struct.pack("<Q", len(form.getvalue())) + form.getvalue() + bytes(64))
        here.close()
        WorkerLine(there).receive()


@pytest.mark.parametrize("kept", [0, 5, 8, 12, 60, 5000])
def test_a_message_that_breaks_off_is_a_lost_connection(kept: int) -> None:
    with pair() as (here, there):
        WorkerLine(here).send((b"x" * 6000, np.arange(10)))
        whole = there.recv(100_000)
    assert kept < len(whole)
    with pair() as (here, there):
        here.sendall(whole[:kept])
        here.close()
        with pytest.raises(ConnectionResetError):
            WorkerLine(there).receive()


@pytest.mark.parametrize("waits", ["to receive", "to send"])
def test_who_waits_in_vain_may_give_up(waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_connection, "LOOK_S", 0.01)

    def look() -> None:
        raise _GaveUp

    with pair() as (here, _), pytest.raises(_GaveUp):
        one = WorkerLine(here, look)
        if waits == "to receive":
            one.receive()
        else:
            one.send(bytes(50_000_000))


def test_waiting_goes_on_as_long_as_the_look_is_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_connection, "LOOK_S", 0.01)
    looks = []
    with pair() as (here, there):
        sender = WorkerLine(here)

        def look() -> None:
            looks.append(1)
            if len(looks) == 3:
                sender.send("late")

        assert WorkerLine(there, look).receive() == "late"


def test_a_desk_answers_until_the_site_hangs_up_and_then_lets_go() -> None:
    with pair() as (here, there):
        desk = PartHost()
        serving = threading.Thread(target=serve, args=(there, desk))
        serving.start()
        asking = WorkerLine(here)
        asking.await_ready()
        for question, answer in [
            (("begin", (TRIAL, ())), None),
            (("call", ("echo", (b"e" * 5000,))), b"e" * 5000),
        ]:
            asking.send(question)
            assert asking.receive() == (DONE, answer, "")
        asking.close()
        serving.join(30)
        assert not serving.is_alive() and desk.call("echo", (b"",))[0] != DONE


@pytest.mark.parametrize(
    "question", [("await_line", ("name",)), ("_told", (1,)), ("__init__", ()), None, ("end",), (7, ())]
)
def test_no_other_function_of_a_desk_is_called(question: object) -> None:
    with pair() as (here, there):
        asking = WorkerLine(here)
        asking.send(question)
        serve(there, PartHost())
        asking.await_ready()
        with pytest.raises(OSError):
            asking.receive()


def test_a_hung_up_line_wakes_who_waits_in_another_thread() -> None:
    with pair() as (here, there):
        waiting, found = WorkerLine(here), []

        def wait() -> None:
            try:
                waiting.receive()
            except OSError as error:
                found.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        waiting.hang_up()
        thread.join(30)
        assert found and io.BytesIO(there.recv(1)).read() == b""
