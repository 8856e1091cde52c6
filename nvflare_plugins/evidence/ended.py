"""Evidence of ended attempts of a job: put aside before the next one begins, and closed where a process died.

A job that waits for a lost site has several attempts, each with logs of its own. The logs of the last one lie where
they always do; those of the attempts before attempt n lie beside them, in a folder that ``before_attempt`` names.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from he_processors.errors import ProtocolError
from nvflare_plugins.evidence.format import (
    EXPORT_SUFFIX,
    GENESIS,
    MAX_LINE_BYTES,
    Earlier,
    Record,
    chain_line,
    export_name,
    parse_line,
    read_link,
    seal_statement,
    time_text,
)
from nvflare_plugins.evidence.log import Signer, utc_now
from nvflare_plugins.files import make_folder, sync_folder, write_durably

PARTIAL_SUFFIX = ".partial"
DIED = "the site's process ended without closing this log"
MAX_ATTEMPTS = 99
_FOLDER = re.compile(r"evidence_before_attempt_([1-9][0-9]?)")


def before_attempt(number: int) -> str:
    """Return the name of the folder with the evidence of what came before an attempt."""
    return f"evidence_before_attempt_{number}"


def put_aside(evidence: Path, number: int, signer: Signer | None, clock: Callable[[], datetime] = utc_now) -> None:
    """Make room for the evidence of an attempt: what is there moves to the folder beside it, whole.

    A log that a dead process left is closed first. If the process ended while this went on, the rest is done now.

    Args:
        evidence: the folder in which every attempt writes its logs.
        number: of the attempt that begins.
        signer: signs with this party's certificate key, as in the sessions before; None where there is none.

    Raises:
        FileExistsError: evidence was put aside for an attempt of this number already, which is never overwritten.
        OSError: it cannot be moved.
    """
    aside = evidence.with_name(before_attempt(number))
    for partial in sorted(evidence.glob(f"*{EXPORT_SUFFIX}{PARTIAL_SUFFIX}")):
        end_torn(partial, signer, clock)
    names = sorted(path.name for path in evidence.iterdir()) if evidence.is_dir() else []
    if not names:
        return
    make_folder(aside)
    there = [name for name in names if (aside / name).exists()]
    if there:
        raise FileExistsError(f"evidence before attempt {number} exists already: {there[0]}")
    for name in names:
        os.replace(evidence / name, aside / name)
    for folder in (aside, evidence, evidence.parent):
        sync_folder(folder)


def set_aside(run: Path) -> dict[int, list[Path]]:
    """Return the logs of earlier attempts of a run, by the number of the attempt before which they were put aside."""
    found = ((_FOLDER.fullmatch(path.name), path) for path in sorted(run.iterdir()) if path.is_dir())
    return {int(match[1]): sorted(path.glob(f"*{EXPORT_SUFFIX}")) for match, path in found if match}


def earlier_log(run: Path, party: str) -> Earlier | None:
    """Return what a party's log of the attempt before was, the last that lies in its run folder; None if there is none.

    A file that was cut counts with its last whole line. One of which nothing can be read is as good as lost.

    Raises:
        OSError: it cannot be read.
    """
    for _, paths in sorted(set_aside(run).items(), reverse=True):
        for path in paths:
            if path.name == export_name(party) and (found := _last_of(path)) is not None:
                return found
    return None


def _last_of(path: Path) -> Earlier | None:
    with path.open("rb") as file:
        first = file.readline(MAX_LINE_BYTES + 1)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 2 * (MAX_LINE_BYTES + 1), 0))  # the last whole line, and one that was torn
        last = (file.read().split(b"\n")[:-1] or [b""])[-1]
    with contextlib.suppress(ProtocolError):
        return Earlier.read(parse_line(first.removesuffix(b"\n")).get("attempt"), parse_line(last).get("hash"))
    return None


def end_torn(partial: Path, signer: Signer | None, clock: Callable[[], datetime] = utc_now) -> None:
    """Close the log of a process that died, as its owner: what it had written stays, and its end says that it died.

    A line that was torn when the process ended, and whatever else does not follow, is left out. A log of which nothing
    can be read is removed.
    """
    records, lines, head = _readable(partial)
    if records:
        if records[-1]["type"] != "end":
            body: Record = {"type": "end", "status": "aborted", "reason": DIED, "time": time_text(clock())}
            line, head = chain_line(head, {**body, "n": len(lines)})
            lines.append(line)
        seal: Record = {"type": "seal", "n": len(lines), "signature": None}
        signed = any(record["type"] == "session" and record.get("signed") is True for record in records)
        if signed and signer is not None:
            seal["signature"] = signer(seal_statement(seal, head)).hex()
        lines.append(chain_line(head, seal)[0])
        write_durably(partial.with_name(partial.name.removesuffix(PARTIAL_SUFFIX)), b"\n".join(lines) + b"\n")
    partial.unlink()
    partial.with_name(f"{partial.name.removesuffix(PARTIAL_SUFFIX)}.reserve").unlink(missing_ok=True)


def _readable(partial: Path) -> tuple[list[dict[str, Any]], list[bytes], bytes]:
    """Return the records that follow from each other, their lines and the hash of the last."""
    records: list[dict[str, Any]] = []
    lines: list[bytes] = []
    head = GENESIS
    for line in partial.read_bytes().split(b"\n")[:-1]:  # a line that does not end was torn
        try:
            record, head = read_link(line, head, len(lines))
        except ProtocolError:
            break
        records.append(record)
        lines.append(line)
    return records, lines, head
