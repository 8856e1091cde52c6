"""Schedulers and workers that answer with code: none of it runs in the process of who asks, whatever the answer."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from he_processors.errors import VeilBoostError
from nvflare_plugins.data.declaration import Cluster
from nvflare_plugins.workers.dask_connection import _Senders, lost
from nvflare_plugins.workers.dask_workers import open_workers
from nvflare_plugins.workers.worker_connection import DONE, installed, source_digest
from tests.support.local_cluster import local_cluster

pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
import msgpack
from distributed.protocol import Serialize, Serialized, ToPickle, dumps

STAGES = ("handshake", "scheduler", "worker", "line")


class Evil:
    """Leaves a trace of the process that loads it."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._trace),)


def serialized(evil: Evil) -> Serialized:
    raw = pickle.dumps(evil)
    return Serialized({"serializer": "pickle", "writeable": ()}, [raw])


def by_dask(evil: Evil) -> Serialized:
    header = {"serializer": "dask", "type-serialized": pickle.dumps(evil), "type": "x", "sub-header": {}}
    return Serialized(header, [b""])


CARRIERS: dict[str, Callable[[Evil], Any]] = {
    "a pickle": ToPickle,
    "something serialised": Serialize,
    "a serialised form": serialized,
    "a type": by_dask,
    "within values": lambda evil: {"workers": {"tcp://127.0.0.1:1": {"status": ToPickle(evil)}}, "status": "OK"},
    "a result": lambda evil: {"status": "OK", "result": Serialize(evil)},
    "an error": lambda evil: {
        "status": "error",
        "text": "x",
        "exception_text": "x",
        "traceback_text": "x",
        "exception": Serialize(evil),
        "traceback": Serialize(evil),
    },
    "an error in bytes": lambda evil: {
        "status": "uncaught-error",
        "exception": pickle.dumps(evil),
        "traceback": pickle.dumps(evil),
        "exception_text": pickle.dumps(evil),
    },
    "bytes": pickle.dumps,
    "an extension": lambda evil: msgpack.ExtType(5, pickle.dumps(evil)),
    "messages of a stream": lambda evil: [{"op": "stream-start"}, {"op": "key-in-memory", "type": pickle.dumps(evil)}],
    "a stream of pickles": lambda evil: [{"op": "event", "topic": "x", "event": ToPickle(evil)}],
}


def forms(evil: Evil) -> list[bytes]:
    """Return pickles of all protocols, and such as name a function in another way."""
    path = str(evil._trace).encode()
    return [pickle.dumps((DONE, evil, ""), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)] + [
        b"(S'" + path + b"'\nios\nmkdir\n.",
        b"(cos\nmkdir\nS'" + path + b"'\no.",
        b"cos\nmkdir\n(S'" + path + b"'\ntR.",
        b"]cos\nmkdir\nb.",
        b"\x82\x01.",
        b"P0\n.",
    ]


def framed(message: Any) -> bytes:
    frames = [bytes(frame) for frame in dumps(message)]
    lengths = struct.pack(f"={len(frames) + 1}Q", len(frames), *map(len, frames))
    content = lengths + b"".join(frames)
    return struct.pack("=Q", len(content)) + content


class Hostile:
    """Scheduler and worker at one port, honest up to a stage."""

    def __init__(self, stage: str, answer: bytes) -> None:
        self._stage, self._answer = stage, answer
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.reached = False

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._server.accept()
                threading.Thread(target=self._talk, args=(link,), daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _say(self, link: socket.socket, stage: str, honest: bytes) -> None:
        hostile = stage == self._stage
        self.reached = self.reached or hostile
        link.sendall(self._answer if hostile else honest)

    def _talk(self, link: socket.socket) -> None:
        info = {"compression": None, "python": (3, 11, 0), "pickle-protocol": 5}
        with link, contextlib.suppress(OSError, struct.error, AttributeError, KeyError, TypeError):
            link.settimeout(20)
            file = link.makefile("rb")
            self._say(link, "handshake", framed(info))
            while True:
                message = self._heard(file)
                op = message.get("op")
                if op == "veilboost_line":
                    link.sendall(b"R")
                    while True:
                        (length,) = struct.unpack("<Q", file.read(8))
                        asked = pickle.loads(file.read(length))  # noqa: S301  # our own bytes
                        self._say(link, "line", self._honest(asked[0]))
                if op == "run":
                    self._say(link, "worker", framed({"status": "OK", "result": None}))
                elif op is not None:
                    known = {self.address: {"name": "0", "status": "running"}}
                    self._say(link, "scheduler", framed({"workers": known, "status": "OK"}))

    def _heard(self, file: Any) -> Any:
        _, n_frames = struct.unpack("=QQ", file.read(16))
        frames = [file.read(n) for n in struct.unpack(f"={n_frames}Q", file.read(8 * n_frames))]
        return msgpack.unpackb(frames[0], strict_map_key=False)

    def _honest(self, asked: str) -> bytes:
        found = {**installed(), "sources": source_digest(), "threads": 1, "spills": False}
        form = pickle.dumps((DONE, found if asked == "describe" else None, ""))
        return struct.pack("<Q", len(form)) + form


@contextlib.contextmanager
def hostile(stage: str, answer: bytes) -> Iterator[Hostile]:
    one = Hostile(stage, answer)
    thread = threading.Thread(target=one.serve, daemon=True)
    thread.start()
    try:
        yield one
    finally:
        one.close()
        thread.join(20)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("stage", ["handshake", "scheduler", "worker"])
def test_no_answer_of_a_cluster_runs_code_at_the_site(stage: str, carrier: str, tmp_path: Path) -> None:
    answer = framed(CARRIERS[carrier](Evil(tmp_path / "trace")))
    with hostile(stage, answer) as cluster:
        with contextlib.suppress(VeilBoostError), open_workers(Cluster(cluster.address, 1, deadline_s=5), find_s=0.5):
            pass
        assert cluster.reached
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("which", range(len(forms(Evil(Path("x"))))))
def test_no_answer_over_a_line_runs_code_at_the_site(which: int, tmp_path: Path) -> None:
    form = forms(Evil(tmp_path / "trace"))[which]
    with hostile("line", struct.pack("<Q", len(form)) + form) as cluster:
        with pytest.raises(VeilBoostError), open_workers(Cluster(cluster.address, 1, deadline_s=5), find_s=0.5):
            pass
        assert cluster.reached
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("carrier", CARRIERS)
def test_no_answer_to_why_a_worker_was_lost_runs_code(carrier: str, tmp_path: Path) -> None:
    with hostile("scheduler", framed(CARRIERS[carrier](Evil(tmp_path / "trace")))) as cluster:
        assert "was lost" in lost(cluster.address, None, 0, "tcp://127.0.0.1:1", 7)
        assert cluster.reached
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("stage", ["handshake", "line"])
def test_no_answer_of_a_worker_runs_code_at_another(stage: str, tmp_path: Path) -> None:
    evil = Evil(tmp_path / "trace")
    form = pickle.dumps((DONE, evil, ""))
    answer = framed(ToPickle(evil)) if stage == "handshake" else struct.pack("<Q", len(form)) + form
    with hostile(stage, answer) as other:
        senders = _Senders(None)
        sent = senders.send((other.address, "desk"), (1, 0, 0, b"sum"))
        assert sent.exception(20) is None if stage == "handshake" else sent.exception(20) is not None
        senders.close()
        assert other.reached
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("=QQ", 16, 0),
        struct.pack("=QQ", 16, 1 << 60),
        struct.pack("=QQQ", 24, 1, 1 << 60),
        struct.pack("=QQQ", 24, 1, 0),
        struct.pack("=QQQ", 24 + 4, 1, 4) + b"\xc1\xc1\xc1\xc1",
        struct.pack("=QQQ", 24 + 600, 1, 600) + b"\x91" * 600,
        struct.pack("=QQQ", 24 + 3, 1, 3) + b"\xa2\xff\xff",
        struct.pack("=QQQ", 24 + 3, 1, 3) + b"\x81\x80\x01",
        struct.pack("=QQQ", 24 + 5, 1, 5) + b"\xdf\xff\xff\xff\xff",
        framed({"workers": {"tcp://127.0.0.1:1": 5}}),
        framed({"workers": {5: {}}}),
        framed({"workers": [1]}),
    ],
    ids=repr,
)
def test_what_is_no_message_is_refused_in_words(raw: bytes) -> None:
    with (
        hostile("scheduler", raw) as cluster,
        pytest.raises(VeilBoostError, match="the scheduler that the policy names"),
    ):
        open_workers(Cluster(cluster.address, 1), find_s=0.5)


PRELOAD = """
import os, pickle, sys
from distributed.protocol import Serialize

class Evil:
    def __reduce__(self):
        return exec, (f"import os; open({TRACE!r} + str(os.getpid()), 'w')",)

def dask_setup(worker):
    from distributed.worker import run as honest
    async def run(comm, function, args=(), kwargs=None, wait=True):
        await honest(worker, comm, function, args=args, kwargs=kwargs, wait=wait)
        return {"status": "OK", "result": Serialize(Evil())}
    worker.handlers["run"] = run
"""


def test_a_workers_hostile_answer_to_run_is_not_loaded(tmp_path: Path) -> None:
    preload = tmp_path / "hostile.py"
    preload.write_text(PRELOAD.replace("{TRACE!r}", repr(str(tmp_path / "trace"))))
    with local_cluster(1, worker_options=("--preload", str(preload))) as cluster:
        with contextlib.suppress(VeilBoostError), open_workers(Cluster(cluster.address, 1, deadline_s=20)):
            pass
        assert "Run out-of-band" in (cluster.folder / "worker0.log").read_text(), "the control: it was asked"
    assert not (tmp_path / f"trace{os.getpid()}").exists()
