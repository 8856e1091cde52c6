"""``veilboost score`` against sockets that answer as they like."""

from __future__ import annotations

import io
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvflare_plugins.cli.main import main
from nvflare_plugins.kinds.vertical_inference.score_socket import reachable


@pytest.fixture
def answers(tmp_path: Path) -> Iterator[tuple[Path, list[bytes], list[bytes]]]:
    """Serve one caller at a socket: the lines to answer with, and those that came; then hang up."""
    path, given, came = tmp_path / "a folder of größe" / "score.sock", [], []
    path.parent.mkdir()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with reachable(path) as name:
        listener.bind(name)
    listener.listen(1)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            for answer in given:
                came.append(lines.readline())
                connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield path, given, came
    listener.close()
    thread.join(10)


def score(path: Path, *arguments: str) -> int:
    return main(["score", "job", *arguments, "--socket", str(path)])


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_umlauts_are_printed_whatever_the_terminal_reads(answers, monkeypatch, encoding: str) -> None:
    path, given, came = answers
    line = '{"scores": [{"id": "größe 7", "class": "東京"}]}\n'.encode()
    given.append(line)
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding))
    assert score(path, "größe 7", "--ids") == 0
    assert shown.getvalue() == line and came == [b'{"ids": ["gr\\u00f6\\u00dfe 7"]}\n']


@pytest.mark.parametrize(
    "answer", [b"", b'{"scores": [', b"no JSON\n", b"[]\n", b"17\n", b"\xff\n", b"[" * 5000 + b"\n"]
)
def test_what_is_no_answer_is_said_so(answers, capfd, answer: bytes) -> None:
    path, given, _ = answers
    given.append(answer)
    assert score(path, "1") == 1
    assert "no longer answers" in capfd.readouterr().err


def test_requests_of_standard_input_are_passed_on_and_an_error_shows(answers, capfd, monkeypatch) -> None:
    path, given, came = answers
    given += [b'{"error": "no"}\n', b'{"scores": []}\n']
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"rows": [1]}\n\n  \nanything')))
    assert score(path) == 1
    assert came == [b'{"rows": [1]}\n', b"anything\n"] and capfd.readouterr().out.splitlines() == [
        '{"error": "no"}',
        '{"scores": []}',
    ]


@pytest.mark.parametrize("rows", [("-1",), ("1.5",), ("٣",), ("1" * 30,), ("1", "--status"), ("--stop", "--status")])
def test_what_is_no_request_is_refused_before_anybody_is_asked(tmp_path: Path, capsys, rows: tuple[str, ...]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", lambda self, name: pytest.fail("somebody was asked"))
        try:
            code = score(tmp_path / "x", *rows)
        except SystemExit as wrong:  # an option that is none
            code = wrong.code
    assert code in (1, 2) and capsys.readouterr().err
