"""The mediator as XGBoost sees it, and as a stranger on the same machine sees it."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import re
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import ProtocolError
from nvflare_plugins.base.errors import JobAborted, time_mends
from nvflare_plugins.pooled.mediated import mediator as mediator_module
from nvflare_plugins.pooled.mediated.communicator import SERVICE, reply_class, request_class
from nvflare_plugins.pooled.mediated.grammar import HorizontalGrammar, Message, TrainingShape
from nvflare_plugins.pooled.mediated.mediator import Mediator
from nvflare_plugins.wire.envelope import BaseScoreSource, Kind, Phase, TrainingStep
from nvflare_plugins.xgb.versions import installed_release

N_FEATURES, MAX_BIN = 3, 8


class Echo:
    """Answers a lone site: its own values are the sums."""

    def __init__(self, change=lambda message, reply: reply):
        self._change = change
        self.kinds: list[Kind] = []

    def answer(self, message: Message, buffer: bytes) -> bytes:
        self.kinds.append(message.kind)
        reply = b"" if message.kind in (Kind.MODEL_PARAMETERS, Kind.SAMPLER_SEED) else buffer
        return self._change(message, reply)


def matrix() -> xgb.QuantileDMatrix:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(100, N_FEATURES)).astype(np.float32)
    return xgb.QuantileDMatrix(features, label=features[:, 0] > 0, max_bin=MAX_BIN)


def shape(data: xgb.QuantileDMatrix) -> TrainingShape:
    n_bins = int(data.get_quantile_cut()[0][-1]) - N_FEATURES
    return TrainingShape(
        1,
        N_FEATURES,
        n_bins,
        1,
        1,
        False,
        4,
        False,
        False,
        BaseScoreSource.MEAN,
        (),
        0,
        installed_release().sends_column_seed,
    )


def train_one_round(handler: Echo, before_update=lambda mediator: None) -> Mediator:
    data = matrix()
    with Mediator(HorizontalGrammar(shape(data)), 0, handler) as mediator:
        try:
            with xgb.collective.CommunicatorContext(
                dmlc_communicator="federated",
                federated_server_address=mediator.address,
                federated_world_size=1,
                federated_rank=0,
            ):
                booster = xgb.Booster({"objective": "binary:logistic", "nthread": 1, "max_bin": MAX_BIN}, [data])
                before_update(mediator)
                mediator.enter(TrainingStep(Phase.UPDATE, 0))
                booster.update(data, 0)
        except xgb.core.XGBoostError as error:
            mediator.surfaced = str(error)
        return mediator


def test_a_round_passes_and_is_named():
    handler = Echo()
    mediator = train_one_round(handler)
    assert mediator.error is None
    assert handler.kinds[:4] == [Kind.FEATURE_COUNT, Kind.ROW_COUNT, Kind.LABEL_MEAN, Kind.MODEL_PARAMETERS]


@pytest.mark.parametrize("change", [lambda m, r: r + bytes(8), lambda m, r: r[:-8], lambda m, r: b""])
def test_a_reply_of_another_length_never_reaches_xgboost(change):
    handler = Echo(lambda m, r: change(m, r) if m.kind is Kind.HISTOGRAM else r)
    mediator = train_one_round(handler)
    assert isinstance(mediator.error, ProtocolError)
    assert "XGBoost expects" in mediator.surfaced


def test_a_broadcast_reply_with_content_is_refused():
    handler = Echo(lambda m, r: b"x" * 10 if m.kind is Kind.MODEL_PARAMETERS else r)
    assert "MODEL_PARAMETERS has 10 bytes" in str(train_one_round(handler).error)


def test_an_abort_surfaces_as_one_error():
    def abort(mediator: Mediator) -> None:
        mediator.abort(JobAborted("the operator ended the job"))

    mediator = train_one_round(Echo(), abort)
    assert "the operator ended the job" in mediator.surfaced


def test_an_unexpected_failure_of_the_handler_ends_the_call_without_its_text():
    def fail(message, reply):
        raise RuntimeError("value 0.123456")

    mediator = train_one_round(Echo(fail))
    assert "internal error" in mediator.surfaced
    assert "0.123456" not in mediator.surfaced


def test_a_full_disk_while_a_message_is_recorded_is_called_by_its_name():
    def fail(message, reply):
        raise OSError(errno.ENOSPC, "No space left on device", "/secret")

    mediator = train_one_round(Echo(fail))
    assert "the disk is full" in mediator.surfaced and "secret" not in mediator.surfaced
    assert time_mends(mediator.error), "a job that waits tries again"


def test_what_xgboost_says_of_a_failure_does_not_travel():
    """Its checks quote the numbers that they compare, such as a mean of labels."""
    mediator = Mediator(HorizontalGrammar(shape(matrix())), 0, Echo())
    assert "1.173" not in str(mediator.reason(xgb.core.XGBoostError("Check failed: base_score < 1 (1.173 vs. 1)")))
    mediator.abort(ProtocolError("said before"))
    assert str(mediator.reason(xgb.core.XGBoostError("internal"))) == "said before"


def test_a_call_out_of_sequence_or_of_another_rank_is_refused():
    data = matrix()
    for fields, words in (({"sequence_number": 5}, "call 5 where 0 is due"), ({"rank": 1}, "claims rank 1")):
        mediator = Mediator(HorizontalGrammar(shape(data)), 0, Echo())
        with mediator, grpc.insecure_channel(mediator.address) as channel:
            call = channel.unary_unary(
                f"/{SERVICE}/Allreduce",
                request_serializer=lambda m: m.SerializeToString(),
                response_deserializer=reply_class("Allreduce").FromString,
            )
            with pytest.raises(grpc.RpcError, match=words):
                call(request_class("Allreduce")(**fields))


def relay(mediator: str, source: str) -> str:
    """Pass one connection on to the mediator from the given address and the mediator's own port."""
    host, port = mediator.split(":")
    entrance = socket.create_server(("127.0.0.1", 0))

    def pump(a: socket.socket, b: socket.socket) -> None:
        try:
            while data := a.recv(1 << 16):
                b.sendall(data)
        except OSError:
            pass

    def serve() -> None:
        outer, _ = entrance.accept()
        inner = socket.socket()
        inner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        inner.bind((source, int(port)))
        inner.connect((host, int(port)))
        threading.Thread(target=pump, args=(inner, outer), daemon=True).start()
        pump(outer, inner)
        inner.close()

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{entrance.getsockname()[1]}"


def test_a_stranger_on_the_same_port_of_another_loopback_address_is_not_served():
    """In place of the stranger's process stands a relay; its own end is among this process's, so it is hidden."""
    data = matrix()
    with Mediator(HorizontalGrammar(shape(data)), 0, Echo()) as mediator, pytest.MonkeyPatch.context() as patch:
        address = relay(mediator.address, "127.0.0.2")
        open_sockets = mediator_module._open_sockets

        def without_the_relay():
            for descriptor in open_sockets():
                with mediator_module._copy_of_socket(descriptor) as own:
                    if "127.0.0.2" not in str(own.getsockname()):
                        yield descriptor

        patch.setattr(mediator_module, "_open_sockets", without_the_relay)
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError, match="another process"):
            channel.unary_unary(f"/{SERVICE}/Allreduce")(b"", timeout=100)


def test_its_own_connection_is_found_while_others_come_and_go():
    """A table of connections read in pieces loses some of them then, and XGBoost was turned away."""
    stop = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0), backlog=100)

    def churn():
        while not stop.is_set():
            pairs = []
            for _ in range(20):
                client = socket.create_connection(listener.getsockname())
                pairs += [client, listener.accept()[0]]
            for one in pairs:
                one.close()

    churning = threading.Thread(target=churn, daemon=True)
    churning.start()
    try:
        for _ in range(20):
            with Mediator(HorizontalGrammar(shape(matrix())), 0, Echo()) as mediator:
                with grpc.insecure_channel(mediator.address) as channel, pytest.raises(grpc.RpcError) as refused:
                    channel.unary_unary(f"/{SERVICE}/Allreduce")(b"", timeout=100)
                assert "another process" not in refused.value.details()
    finally:
        stop.set()
        churning.join(10)
        listener.close()


def test_another_process_is_not_served():
    """Any local user can connect to a loopback port: only this process is answered."""
    script = textwrap.dedent(
        """
        import sys, grpc
        with grpc.insecure_channel(sys.argv[1]) as channel:
            try:
                channel.unary_unary(sys.argv[2])(b"", timeout=100)
            except grpc.RpcError as error:
                print(error.details())
        """
    )
    data = matrix()
    with Mediator(HorizontalGrammar(shape(data)), 0, Echo()) as mediator:
        command = [sys.executable, "-c", script, mediator.address, f"/{SERVICE}/Allreduce"]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    assert "another process" in printed
    assert mediator.error is None


def stranger(address: str, script: str, **more) -> str:
    """Run a client in another process, with the mediator's address and a method's name as arguments."""
    command = [sys.executable, "-c", textwrap.dedent(script), address, f"/{SERVICE}/Allreduce"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, **more).stdout


def test_a_stranger_does_not_end_the_job():
    """One connection of any local user once did. It neither ends the job nor learns of its errors nor holds it up."""
    answers = []

    def interfere(mediator: Mediator) -> None:
        script = """
            import os, sys, time, grpc
            channels = [grpc.insecure_channel(sys.argv[1]) for _ in range(8)]
            # Calls that never send their message, which would occupy whoever waits for it.
            calls = [channel.stream_unary(sys.argv[2]) for channel in channels]
            hanging = [call.future(iter(lambda: time.sleep(600), 0)) for call in calls]
            codes = [call.code().name for call in hanging]
            try:
                channels[0].unary_unary(sys.argv[2])(b"nonsense" * 100, timeout=100)
            except grpc.RpcError as error:
                codes.append(error.code().name)
            print(" ".join(codes), flush=True)
            os._exit(0)
        """
        answers.append(stranger(mediator.address, script).split())

    handler = Echo()
    mediator = train_one_round(handler, interfere)
    assert answers == [["PERMISSION_DENIED"] * 9]
    assert mediator.error is None and Kind.HISTOGRAM in handler.kinds


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def test_long_messages_are_refused_before_they_take_memory():
    """Three calls of 500 MB once took 1.6 GiB: strangers' are not read at all, this process's up to the catalogue."""
    data = matrix()
    with Mediator(HorizontalGrammar(shape(data)), 0, Echo()) as mediator:
        Path("/proc/self/clear_refs").write_text("5")  # start the peak anew
        before = peak_bytes()
        script = """
            import sys, grpc
            options = [("grpc.max_send_message_length", -1)]
            calls = [grpc.insecure_channel(sys.argv[1], options).unary_unary(sys.argv[2]).future(bytes(size))
                     for size in (60_000_000, 60_000_000, 60_000)]
            print(*(call.code().name for call in calls))
        """
        codes = stranger(mediator.address, script).split()
        assert set(codes) <= {"PERMISSION_DENIED", "RESOURCE_EXHAUSTED"}
        assert peak_bytes() - before < 30_000_000 and mediator.error is None
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(mediator.address, options) as channel, pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary(f"/{SERVICE}/Allreduce")(
                bytes(HorizontalGrammar(shape(data)).largest_message_bytes + 5000)
            )
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "more bytes than any message" in str(mediator.error)


def test_bytes_that_are_no_message_are_refused_in_words():
    with Mediator(HorizontalGrammar(shape(matrix())), 0, Echo()) as mediator:
        with (
            grpc.insecure_channel(mediator.address) as channel,
            pytest.raises(grpc.RpcError, match="none of its protocol"),
        ):
            channel.unary_unary(f"/{SERVICE}/Allreduce")(b"\xff" * 50)
        assert isinstance(mediator.error, ProtocolError)


def client_on(address: str, port: int) -> str:
    """Return what the mediator answers to a connection of another process from one port."""
    script = """
        import socket, sys, time
        host, port = sys.argv[1].split(":")
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(("127.0.0.1", PORT))
        own.connect((host, int(port)))
        import threading
        entrance = socket.create_server(("127.0.0.1", 0))
        def pump(a, b):
            while data := a.recv(65536):
                b.sendall(data)
        def serve():
            outer, _ = entrance.accept()
            threading.Thread(target=pump, args=(own, outer), daemon=True).start()
            pump(outer, own)
        threading.Thread(target=serve, daemon=True).start()
        import grpc
        with grpc.insecure_channel("127.0.0.1:%d" % entrance.getsockname()[1]) as channel:
            try:
                channel.unary_unary(sys.argv[2])(b"", timeout=100)
                print("SERVED")
            except grpc.RpcError as error:
                print(error.code().name)
    """
    return stranger(address, script.replace("PORT", str(port))).strip()


def bind_where_no_one_else_does(own: socket.socket) -> None:
    """Bind to a port that the system gives to no connection of its own accord: it is free again afterwards."""
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for number in range(1000):
        try:
            return own.bind(("127.0.0.1", 1024 + (os.getpid() * 37 + number) % (lowest_given - 1024)))
        except OSError:
            continue
    raise AssertionError("no port is free")


@contextmanager
def connection_whose_port_is_free_afterwards(address: str):
    """Pass a connection on from a socket of this process that ends by a reset: its port waits for nothing then."""
    host, port = address.split(":")
    entrance, own, done = socket.create_server(("127.0.0.1", 0)), socket.socket(), threading.Event()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    bind_where_no_one_else_does(own)
    own.connect((host, int(port)))

    def pump(a: socket.socket, b: socket.socket) -> None:
        while not done.is_set():
            try:
                b.sendall(a.recv(1 << 16))
            except TimeoutError:
                continue

    def serve() -> None:
        outer, _ = entrance.accept()
        for one in (outer, own):
            one.settimeout(0.05)
        back = threading.Thread(target=pump, args=(own, outer))
        back.start()
        pump(outer, own)
        back.join()
        outer.close()

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        yield f"127.0.0.1:{entrance.getsockname()[1]}"
    finally:
        done.set()
        serving.join(10)
        own.close()
        entrance.close()


def test_trust_ends_with_the_connection():
    """A port that was XGBoost's is another's once XGBoost's connection has gone; trust in it once outlived that."""
    with Mediator(HorizontalGrammar(shape(matrix())), 0, Echo()) as mediator:
        with (
            connection_whose_port_is_free_afterwards(mediator.address) as address,
            grpc.insecure_channel(address) as channel,
            pytest.raises(grpc.RpcError, match="claims rank 7"),
        ):
            channel.unary_unary(f"/{SERVICE}/Allreduce")(request_class("Allreduce")(rank=7).SerializeToString())
        peer, _ = mediator._own_end
        mediator.error = None  # what the next caller would be told
        assert client_on(mediator.address, int(peer.rsplit(":", 1)[1])) == "PERMISSION_DENIED"


def test_a_descriptor_that_is_a_locked_file_by_now_is_left_alone(tmp_path):
    """The one that XGBoost's socket had may be a ledger's a moment later: a copy left behind kept its lock for ever."""
    mediator = Mediator(HorizontalGrammar(shape(matrix())), 0, Echo())
    with open(tmp_path / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not mediator._is_own_end("ipv4:127.0.0.1:1", held.fileno())
    with open(tmp_path / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_longest_message_follows_from_the_shape():
    small = shape(matrix())
    assert HorizontalGrammar(small).largest_message_bytes == 1 << 16  # the model's parameters
    wide = dataclasses.replace(small, n_bins=100_000, max_built_nodes=8)
    assert HorizontalGrammar(wide).largest_message_bytes == 16 * 100_000 * 8
    assert HorizontalGrammar(dataclasses.replace(small, adaptive_leaf=True)).largest_message_bytes == 4 << 20
