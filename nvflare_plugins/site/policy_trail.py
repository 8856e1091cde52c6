"""The trail of a site's policy: each text that it has had, when and by whom, beside the site's runs.

A job and ``veilboost site-setup`` add a line when the policy is another than on the last line. Lines are chained by
hashes, so that one that was changed or taken out is noticed, unless it is the last. The trail stays at the site.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.site.policy import SitePolicy, policy_path

FILE = "policy_changes.jsonl"


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """One line of the trail.

    Attributes:
        at: when it was noticed, ISO 8601 in UTC.
        written: when the file was last written, likewise.
        owner: user of the system that the file belongs to.
        noticed_by: "job ID" or "site-setup".
        changed: keys that differ from the line before; all keys on the first line.
    """

    at: str
    written: str
    owner: str
    noticed_by: str
    changed: tuple[str, ...]
    policy: Mapping[str, Any]


def note_policy(policy: SitePolicy, noticed_by: str) -> tuple[str, ...]:
    """Add the policy's file to the trail, durably, if it differs from the last line; return the keys that differ.

    Nothing is written before the site has a folder of runs: the first job makes it.

    Raises:
        ConfigurationError: the trail is damaged.
        OSError: it cannot be written.
    """
    if not policy.runs.is_dir():
        return ()
    source = policy_path(policy.workspace, policy.site)
    document: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    path, status = policy.runs / FILE, source.stat()
    with _locked(path) as descriptor:
        changes, last = _read(path, _content(descriptor))
        before = changes[-1].policy if changes else {}
        changed = tuple(sorted(key for key in {*before, *document} if before.get(key) != document.get(key)))
        if not changed:
            return ()
        line = {
            "at": _utc(datetime.now(UTC).timestamp()),
            "written": _utc(status.st_mtime),
            "owner": _user(status.st_uid),
            "noticed_by": noticed_by,
            "changed": changed,
            "policy": document,
            "previous": last,
        }
        with os.fdopen(os.dup(descriptor), "ab") as file:  # writes all of it, or raises
            file.write(json.dumps(line, sort_keys=True).encode() + b"\n")
        os.fsync(descriptor)
    return changed


def trail(runs: Path) -> list[PolicyChange]:
    """Return the trail beside a site's runs, the oldest line first. Raises: ConfigurationError, if it is damaged."""
    path = runs / FILE
    try:
        return _read(path, path.read_bytes())[0]
    except FileNotFoundError:
        return []


def _read(path: Path, content: bytes) -> tuple[list[PolicyChange], str]:
    """Return the lines of a trail, and the hash of the last one."""
    changes, previous = [], ""
    for number, line in enumerate(content.splitlines(), 1):
        try:
            found = json.loads(line)
            is_next = found.pop("previous") == previous
            changes.append(PolicyChange(**{**found, "changed": tuple(found["changed"])}))
        except (ValueError, TypeError, KeyError, AttributeError):
            is_next = False
        if not is_next:
            raise ConfigurationError(
                f"line {number} of {path} is damaged, or lines before it are missing. Remedy: restore the file, or "
                "move it away and keep it; a new trail then begins"
            )
        previous = hashlib.sha256(line).hexdigest()
    return changes, previous


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open a trail for one writer. A line that a crash cut short is taken off."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        content = _content(descriptor)
        os.ftruncate(descriptor, content.rfind(b"\n") + 1)
        yield descriptor
    finally:
        os.close(descriptor)


def _content(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read()


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
