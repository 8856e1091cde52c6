"""The reader's part for jobs that stay; see `reader.py`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.vectors.form import Given, blob
from tests.vectors.reader import Cursor, require
from tests.vectors.reader_parties import vertical_message

LIMITS = (None, "predictions_per_job", "scoring_rows_per_day", "scoring_bits_per_row")
_JOB_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


def _message(data: bytes, due: str) -> Any:
    found = vertical_message({"data": data.hex()})
    require(found["message"] == due)
    return found


def question(given: Given) -> Any:
    c = Cursor(blob(given["data"]))
    what = c.number("B", 1, 3)
    rest = c.data[1:]
    if what == 1:
        require(rest and len(rest) % 4 == 0 and len(rest) // 4 <= given["most"])
        rows = [c.number("I", 0, given["rows"] - 1) for _ in range(len(rest) // 4)]
        require(rows == sorted(set(rows)))
        return {"question": "OPEN", "rows": rows}
    if what == 2:
        return {"question": "ASK", "asks": _message(rest, "DecisionRequest")}
    require(not rest or (_JOB_ID.fullmatch(rest) and rest not in (b".", b"..")))
    return {"question": "NEXT", "alignment": rest.decode() or None}


def answer(given: Given) -> Any:
    c = Cursor(blob(given["data"]))
    if c.number("B", 0, 1) == 1:
        limit = LIMITS[c.number("B", 0, len(LIMITS) - 1)]
        c.end()
        return {"refused": True, "limit": limit}
    rest = c.data[1:]
    if given["to"] == "ASK":
        return {"refused": False, "told": _message(rest, "DecisionAnswer")}
    require(not rest)
    return {"refused": False, "told": None}


FORMATS: dict[str, Callable[[Given], Any]] = {"serving question": question, "serving answer": answer}
