"""A passive party while a job stays: it answers for the rows that the active party names, within its own limits.

Privacy: what one batch tells is what a prediction of its rows tells (``inference``), and when each row is asked for is
    known besides. A row is charged, durably, before the first answer about it leaves; a row that a limit forbids ends
    no job: the active party is told which limit, and neither which of the rows nor how many.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from he_processors.errors import PolicyRefusal, ProtocolError
from nvflare_plugins.failures import DataRefusal
from nvflare_plugins.site.memory.scoring_budget import ScoringRefusal
from nvflare_plugins.vertical.model.model_files import PassivePart
from nvflare_plugins.vertical.model.routing_audit import REFUSED
from nvflare_plugins.vertical_inference.inference import PathOwner
from nvflare_plugins.vertical_inference.row_budget import RowBudget
from nvflare_plugins.vertical_inference.rows import Rows
from nvflare_plugins.vertical_inference.serving.asked_rows import AskedRows
from nvflare_plugins.vertical_inference.serving.messages import (
    LIMITS,
    Question,
    answered,
    opened_rows,
    read_next_step,
    refused,
    split_question,
)


class RowOwner:
    """Answers questions about rows of one alignment. Not safe for concurrent use.

    Attributes:
        next_alignment: how the active party goes on after the conversation, once ``is_over``; None ends the job.
    """

    def __init__(
        self,
        part: PassivePart,
        rows: Rows,
        budget: RowBudget,
        refuse: Callable[[list[str] | None], None],
        most_rows: int,
        in_job: AskedRows,
        note: Callable[[str], None] = lambda text: None,
        alignment: str = "",
    ) -> None:
        """Hold rows ready.

        Args:
            refuse: raises for rows about which nothing must be told, whatever the budget; None are rows without ids.
            most_rows: of a batch.
            in_job: the rows that the job has asked for so far, and how many it may (``vertical.predictions_per_job``).
            note: writes into this site's own log.
            alignment: that the rows are of, where they have no ids.
        """
        self._part, self._rows, self._budget, self._refuse = part, rows, budget, refuse
        self._names = rows.names()
        self._most_rows, self._in_job, self._note = most_rows, in_job, note
        self._alignment = "" if rows.ids is not None else alignment
        self._batch: tuple[Rows, PathOwner] | None = None
        self._is_charged = np.zeros(rows.n_rows, dtype=bool)  # on the record with these values
        self._positions = np.zeros(0, dtype=np.int64)
        self._refusal: str | None = None
        self._is_noted = False
        self.is_over = False
        self.next_alignment: str | None = None

    def answer(self, question: bytes) -> bytes:
        """Answer one question.

        Raises:
            ProtocolError: it has no place here; always with the same text.
        """
        what, content = split_question(question)
        if self.is_over:
            raise ProtocolError(REFUSED)
        try:
            if what is Question.OPEN:
                self._open(content)
                return answered()
            if what is Question.ASK and self._batch is None and self._refusal is not None:
                return refused(self._refusal)  # asked together with the batch
            if what is Question.ASK:
                return answered(self._ask(content))
        except (PolicyRefusal, DataRefusal) as error:
            self._batch, self._refusal = None, self._limit_of(error)
            return refused(self._refusal)
        self.next_alignment = read_next_step(content)
        self.is_over = True
        return answered()

    def _open(self, content: bytes) -> None:
        self._batch, self._refusal = None, None
        positions = opened_rows(content, self._rows.n_rows, self._most_rows)
        names = [self._names[place] for place in positions]
        rows = Rows(self._rows.features[positions], tuple(name.encode() for name in names))
        self._refuse(None if self._rows.ids is None else names)
        new = self._in_job.new(names, self._alignment)
        if new is None:
            raise ScoringRefusal("predictions_per_job", "as many rows as one job may ask for have been asked for")
        if not self._is_charged[positions].all():
            self._budget.check(rows)
        self._in_job.note(new)
        self._positions = positions
        self._batch = rows, PathOwner(self._part, rows.features, rows.n_rows)

    def _ask(self, content: bytes) -> bytes:
        if self._batch is None:
            raise ProtocolError(REFUSED)
        rows, owner = self._batch
        if not self._is_charged[self._positions].all():
            self._budget.charge(rows)
            self._is_charged[self._positions] = True
        return owner.answer_bytes(content)

    def _limit_of(self, error: PolicyRefusal | DataRefusal) -> str:
        if not self._is_noted:  # once in each conversation: a caller could fill the log
            self._note(f"rows were refused: {getattr(error, 'reason', error)}")
            self._is_noted = True
        limit = error.limit if isinstance(error, ScoringRefusal) else ""
        return limit if limit in LIMITS else ""
