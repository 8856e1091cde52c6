"""A job that stays: its messages against hostile bytes, its queue, its socket's name, and a later attempt's rows."""

from __future__ import annotations

import contextlib
import errno
import socket
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ProtocolError
from nvflare_plugins.data.declaration import IdForm
from nvflare_plugins.kinds.vertical_inference import serving
from nvflare_plugins.kinds.vertical_inference.inference import Rows
from nvflare_plugins.kinds.vertical_inference.score_socket import Command, Refused, RequestQueue, ScoreSocket, reachable
from nvflare_plugins.site.memory.budgets import ScoringRefusal
from tests.unit.nvflare_plugins.vertical_inference.test_explanations import FEATURES, PART


def test_questions_and_answers_come_back_as_they_were():
    positions = np.array([0, 3, 2**31], dtype=np.int64)
    what, content = serving.split_question(serving.open_rows(positions))
    assert what is serving.Question.OPEN and serving.opened_rows(content, 2**31 + 1, 3).tolist() == positions.tolist()
    for alignment in ("night-2", None):
        what, content = serving.split_question(serving.next_step(alignment))
        assert what is serving.Question.NEXT and serving.read_next_step(content) == alignment
    assert serving.read_answer(serving.answered(b"bits")) == (b"bits", None)
    assert [serving.read_answer(serving.refused(limit)) for limit in serving.LIMITS] == [
        (b"", limit) for limit in serving.LIMITS
    ]
    assert (
        serving.open_rows(np.array([1, 258])).hex() == "010100000002010000"
        and serving.refused(serving.LIMITS[2]).hex() == "0102"
    )


@pytest.mark.parametrize(
    "content", [b"", b"\0\0\0", b"\5\0\0\0", b"\1\0\0\0\1\0\0\0", b"\2\0\0\0\1\0\0\0", bytes(16), b"\xff\xff\xff\xff"]
)
def test_rows_of_a_batch_are_ascending_and_there(content):
    with pytest.raises(ProtocolError, match="does not answer"):
        serving.opened_rows(content, 5, 3)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_question_or_one_error(data):
    with contextlib.suppress(ProtocolError):
        what, content = serving.split_question(data)
        if what is serving.Question.OPEN:
            assert serving.opened_rows(content, 5, 3).size <= 3
        elif what is serving.Question.NEXT:
            assert serving.read_next_step(content) is None or "/" not in str(serving.read_next_step(content))
    with contextlib.suppress(ProtocolError):
        content, limit = serving.read_answer(data)
        assert limit is None or (limit in serving.LIMITS and not content)


class Budget:
    """Counts what is checked and charged."""

    def __init__(self) -> None:
        self.checked: list[list[str]] = []
        self.charged: list[list[str]] = []

    def check(self, names, values) -> None:
        self.checked.append(names)

    def charge(self, names, values) -> None:
        self.charged.append(names)


class InJob(serving.AskedRows):
    """The rows of a job, in memory."""

    def __init__(self, most: int) -> None:
        self._rows, self._most, self._key = set(), most, b"key"

    def note(self, rows) -> None:
        self._rows.update(rows)


def owner_of(budget: Budget, most_in_job: int = 100, in_job: serving.AskedRows | None = None) -> serving.RowOwner:
    rows = Rows(FEATURES, (b"ann", b"bob", b"cyd", b"dan"))
    return serving.RowOwner(PART, rows, budget, lambda names: None, 3, InJob(most_in_job) if in_job is None else in_job)  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=30), max_size=8))
def test_any_conversation_ends_in_one_text(questions):
    owner = owner_of(Budget())
    for question in (serving.open_rows(np.array([0, 2])), *questions):
        try:
            owner.answer(question)
        except ProtocolError as error:
            assert str(error) == "a question that this party does not answer"


def test_a_row_is_charged_before_its_first_answer_and_once_a_batch():
    from nvflare_plugins.kinds.vertical.messages import Bits, DecisionRequest, PathQuery, to_bytes

    def ask(tree: int, node: int, rows: list[bool]) -> bytes:
        request = DecisionRequest(0, (PathQuery(tree, node, Bits.of(np.array(rows))),))
        return bytes([serving.Question.ASK]) + to_bytes(request)

    budget = Budget()
    owner = owner_of(budget)
    with pytest.raises(ProtocolError):
        owner.answer(ask(0, 0, [True]))
    owner.answer(serving.open_rows(np.array([1, 3])))
    assert budget.checked == [["bob", "dan"]] and not budget.charged
    owner.answer(ask(0, 0, [True, True]))
    owner.answer(ask(1, 0, [True, True]))
    assert budget.charged == [["bob", "dan"]]
    owner.answer(serving.open_rows(np.array([1, 3])))
    owner.answer(ask(0, 0, [True, True]))
    assert len(budget.checked) == len(budget.charged) == 1, "the same values as before"
    owner.answer(serving.open_rows(np.array([0, 1])))
    owner.answer(ask(0, 0, [True, True]))
    assert budget.charged[1:] == [["ann", "bob"]]
    owner.answer(serving.next_step(None))
    assert owner.is_over and owner.next_alignment is None
    with pytest.raises(ProtocolError):
        owner.answer(serving.open_rows(np.array([0])))


def test_what_is_asked_with_a_batch_that_is_refused_is_refused_too():
    class Spent(Budget):
        def check(self, names, values) -> None:
            raise ScoringRefusal("scoring_bits_per_row", "has shown as much as it does")

    said: list[str] = []
    rows = Rows(FEATURES, (b"ann", b"bob", b"cyd", b"dan"))
    in_job = InJob(100)
    owner = serving.RowOwner(PART, rows, Spent(), lambda names: None, 3, in_job, said.append)  # type: ignore[arg-type]
    for _ in range(3):
        assert serving.read_answer(owner.answer(serving.open_rows(np.array([1])))) == (b"", "scoring_bits_per_row")
        assert serving.read_answer(owner.answer(bytes([serving.Question.ASK]) + b"anything")) == (
            b"",
            "scoring_bits_per_row",
        )
    assert len(in_job) == 0 and len(said) == 1
    job = owner_of(Budget(), most_in_job=2)
    job.answer(serving.open_rows(np.array([0, 1])))
    assert serving.read_answer(job.answer(serving.open_rows(np.array([2])))) == (b"", "predictions_per_job")
    assert serving.read_answer(job.answer(serving.open_rows(np.array([1])))) == (b"", None)


def test_rows_of_a_job_are_counted_over_its_attempts(tmp_path):
    """A server that breaks a job off again and again gets no more rows of it."""
    path = tmp_path / serving.ASKED_FILE

    def attempt() -> serving.RowOwner:
        return owner_of(Budget(), in_job=serving.AskedRows(path, b"key", 3))

    assert serving.read_answer(attempt().answer(serving.open_rows(np.array([0, 1])))) == (b"", None)
    with path.open("ab") as file:  # torn by a crash
        file.write(b"\x01" * 5)
    assert serving.read_answer(attempt().answer(serving.open_rows(np.array([1, 2])))) == (b"", None)
    later = attempt()
    assert serving.read_answer(later.answer(serving.open_rows(np.array([3])))) == (b"", "predictions_per_job")
    assert serving.read_answer(later.answer(serving.open_rows(np.array([0, 1, 2])))) == (b"", None)
    assert path.stat().st_size == 24 and path.stat().st_mode & 0o777 == 0o600
    assert b"ann" not in path.read_bytes()


def test_rows_that_could_not_be_noted_are_not_answered_for_and_positions_count_by_alignment(tmp_path, monkeypatch):
    path = tmp_path / serving.ASKED_FILE
    asked = serving.AskedRows(path, b"key", 9)
    asked.note(asked.new(["0", "1"], "a"))

    def full(descriptor, data, offset):
        raise OSError(errno.ENOSPC, "disk is full")

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr("os.pwrite", full)
        asked.note(asked.new(["2"], "a"))
    assert len(asked) == 2 and len(asked.new(["0", "2"], "a")) == 1 and len(asked.new(["0", "2"], "b")) == 2
    asked.note(asked.new(["0", "1", "2"], "b"))
    assert len(serving.AskedRows(path, b"key", 9)) == 5
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        serving.AskedRows(path, b"key", 9)


def test_the_desk_hands_out_commands_first_and_no_more_rows_than_asked():
    desk = RequestQueue(most_waiting=3)
    waiting = [desk.submit(rows) for rows in ([1, 2], [3], [4, 5])]
    with pytest.raises(Refused, match="3 requests are waiting"):
        desk.submit([6])
    desk.command("refresh", "night-2")
    with pytest.raises(Refused, match="another command"):
        desk.command("stop")
    command = desk.take(3, 0)
    assert isinstance(command, Command) and command.argument == "night-2"
    taken = desk.take(3, 0)
    assert not isinstance(taken, Command) and [one.positions for one in taken] == [(1, 2), (3,)]
    desk.close("it has ended")
    with pytest.raises(Refused, match="it has ended"):
        waiting[2].result(0)
    with pytest.raises(Refused, match="it has ended"):
        desk.submit([1])


def test_a_request_whose_caller_has_left_is_not_worked_on():
    desk = RequestQueue()
    desk.submit([1]).cancel()
    desk.submit([2])
    taken = desk.take(10, 0)
    assert not isinstance(taken, Command) and [one.positions for one in taken] == [(2,)]


def test_a_socket_in_a_folder_of_any_depth(tmp_path):
    folder = tmp_path.joinpath(*["a-folder-with-a-long-name"] * 8)
    folder.mkdir(parents=True)
    (folder / "score.sock").touch()  # left by a process that was killed
    shown = SimpleNamespace(n_rows=3, places=list, status=lambda: {"common_rows": 3})
    with (
        ScoreSocket(folder, RequestQueue(), lambda: shown, 5) as door,
        reachable(door.path) as name,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller,
    ):
        caller.connect(name)
        caller.sendall(b'{"status": true}\n')
        assert caller.recv(100) == b'{"common_rows": 3}\n'
    assert not (folder / "score.sock").exists()


def test_a_later_attempt_goes_on_with_the_alignment_in_use(tmp_path):
    def run(number: int, alignment: str | None) -> SimpleNamespace:
        context = SimpleNamespace(runs=tmp_path, job_id="job", number=number)
        attempt = SimpleNamespace(gather_sealed=lambda purpose, content: [b"other", content])
        return SimpleNamespace(
            job=SimpleNamespace(alignment=alignment), context=context, attempt=attempt, active_rank=1
        )

    (tmp_path / "job").mkdir()
    assert serving.alignment_in_use(run(1, "first")) == "first" == serving.alignment_in_use(run(2, "first"))
    assert serving.alignment_in_use(run(2, None)) is None
    (tmp_path / "job" / "alignment.npz").touch()
    assert serving.alignment_in_use(run(1, "first")) == "first"
    assert (
        serving.alignment_in_use(run(2, "first")) == "job" and serving.alignment_in_use(run(2, "night-1")) == "night-1"
    )
    serving.note_alignment(run(1, "first").context, "night-2")  # type: ignore[arg-type]  # a context's two facts
    assert serving.alignment_in_use(run(3, "first")) == "night-2"


@pytest.mark.parametrize("asked", ["größe 7", "gr\u006f\u0308ße  7", " größe\t7 "])
def test_an_id_is_found_however_its_text_is_written(asked):
    """As in the files of the parties: the same letters in another form of Unicode, other white space."""
    rows = Rows(np.zeros((2, 1), np.float32), (b"a", "größe 7".encode()))
    shown = serving._RowIndex(rows, serving.Served("night", 2), IdForm())
    assert shown.places([asked, "a"]) == [1, 0]
    for bad in ("grosse 7", "", "größe\u200b 7", "\ud800", "x" * 5000):
        with pytest.raises(Refused, match="1 of 1 ids are not among"):
            shown.places([bad])
