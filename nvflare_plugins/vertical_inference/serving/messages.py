"""What the active party and the owners of splits say to each other in a job that stays.

Questions: ``open`` names the rows of the next batch, by position in the standing alignment; ``ask`` is a
``DecisionRequest`` about that batch; ``next`` says how to go on after this conversation: with another alignment, or not
at all. Every answer says first whether it is one, or which of the owner's limits forbids it.

Bytes: a question is one byte (1 open, 2 ask, 3 next) and its content: positions as uint32, little-endian, ascending;
the bytes of the request; the id of a job in ASCII, or nothing. An answer is a byte 0 and the bytes of a
``DecisionAnswer``, or nothing; or a byte 1 and one byte, a place in ``LIMITS``.
"""

from __future__ import annotations

import re
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.vertical.model.routing_audit import REFUSED

LIMITS = ("", "predictions_per_job", "scoring_rows_per_day", "scoring_bits_per_row")
"""Keys below ``vertical`` of a policy that refuse rows; the first: the owner's own log says why."""
_JOB_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Question(IntEnum):
    """The first byte of a question."""

    OPEN = 1
    ASK = 2
    NEXT = 3


def is_job_id(text: str) -> bool:
    """Return whether a text can be a job's id."""
    return _JOB_ID.fullmatch(text) is not None and text not in (".", "..")


def split_question(data: bytes) -> tuple[Question, bytes]:
    """Return what is asked, and the content. Raises: ProtocolError."""
    if not data or data[0] not in tuple(Question):
        raise ProtocolError(REFUSED)
    return Question(data[0]), data[1:]


def open_rows(positions: NDArray[np.int64]) -> bytes:
    """Return the question that begins a batch. Shapes: positions: int64[n], ascending."""
    return bytes([Question.OPEN]) + positions.astype("<u4").tobytes()


def opened_rows(content: bytes, n_rows: int, most: int) -> NDArray[np.int64]:
    """Read the rows of a batch.

    Args:
        n_rows: of the alignment.
        most: rows of a batch.

    Raises:
        ProtocolError: none, too many, not ascending, or others than there are; always with the same text.
    """
    if len(content) % 4 or not 1 <= len(content) // 4 <= most:
        raise ProtocolError(REFUSED)
    positions = np.frombuffer(content, dtype="<u4").astype(np.int64)
    if positions[-1] >= n_rows or (np.diff(positions) <= 0).any():
        raise ProtocolError(REFUSED)
    return positions


def next_step(alignment: str | None) -> bytes:
    """Return the last question of a conversation. Args: alignment: whose rows come next; None ends the job."""
    return bytes([Question.NEXT]) + (alignment or "").encode("ascii")


def read_next_step(content: bytes) -> str | None:
    """Read how to go on, as given to ``next_step``. Raises: ProtocolError."""
    alignment = content.decode("latin-1")
    if alignment and not is_job_id(alignment):
        raise ProtocolError(REFUSED)
    return alignment or None


def answered(content: bytes = b"") -> bytes:
    """Return an answer."""
    return b"\0" + content


def refused(limit: str) -> bytes:
    """Return a refusal. Args: limit: one of ``LIMITS``."""
    return bytes([1, LIMITS.index(limit)])


def read_answer(data: bytes) -> tuple[bytes, str | None]:
    """Return an answer's content and None, or nothing and the limit that forbids one. Raises: ProtocolError."""
    if data[:1] == b"\0":
        return data[1:], None
    if len(data) == 2 and data[0] == 1 and data[1] < len(LIMITS):
        return b"", LIMITS[data[1]]
    raise ProtocolError("an answer that is none")
