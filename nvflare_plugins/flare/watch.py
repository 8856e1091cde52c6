"""Numbers of a kit while no job runs: processes, disk, certificate, memory and ledgers, beside the files of jobs.

``veilboost watch KIT`` writes them every half minute into the folder that ``VEILBOOST_METRICS`` names, as jobs do. It
needs no FLARE and stops none. The file of a job whose process was killed says "running" for ever; the watch writes
"lost" into it. Processes are looked up in /proc by the kit's path among their arguments: those of other users and of
containers are not seen.

Privacy: as ``metrics``: files of this machine, of which nothing travels.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dp_components.errors import PrivacyError
from dp_components.ledger import Ledger, ledger_files
from he_processors.errors import VeilBoostError
from nvflare_plugins.flare.metrics import Family, Labels, MetricsFile, rendered, replace_file, with_state_lost
from nvflare_plugins.site.flare_boundary import Role
from nvflare_plugins.site.memory.store import NAME, last_backup
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.setup import certificate_end, policy_of

SILENT_S = 120.0
"""A running job's file is written every few seconds; one that is as old as this belongs to no process."""
_PARENTS = ("client_train", "server_train")
_JOBS = ("worker_process", "runner_process")
_PROCESSES = Path("/proc")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_UPDATED = re.compile(r"^veilboost_(?:site|server)_updated_seconds\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Process:
    """A process of FLARE for a kit. Attributes: is_job: of a job, not the one that waits for jobs."""

    is_job: bool
    resident_bytes: int


def processes_of(kit: Path, processes: Path = _PROCESSES) -> list[Process]:
    """Return FLARE's processes whose arguments name a kit."""
    found = []
    for folder in processes.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # it has ended, or is another user's
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            modules = [argument.rpartition(".")[2] for argument in arguments]
            is_job = any(module in _JOBS for module in modules)
            if (is_job or any(module in _PARENTS for module in modules)) and _names(arguments, kit):
                resident = int((folder / "statm").read_text().split()[1]) * _PAGE
                found.append(Process(is_job, resident))
    return found


def _names(arguments: list[str], kit: Path) -> bool:
    return any(Path(argument).is_absolute() and Path(os.path.normpath(argument)) == kit for argument in arguments)


def families(kit: Path, role: Role, now: float, processes: Path = _PROCESSES) -> Iterator[Family]:
    """Yield the numbers of a kit. Raises: ConfigurationError, if a site's policy cannot be read."""
    running = processes_of(kit, processes)
    parents = [one for one in running if not one.is_job]
    yield _one("veilboost_kit_up", "1 while FLARE's own process runs.", bool(parents))
    yield _one("veilboost_kit_job_processes", "Processes of jobs.", len(running) - len(parents))
    resident = sum(one.resident_bytes for one in running)
    yield _one("veilboost_kit_resident_bytes", "Memory of all these processes.", resident)
    yield _one("veilboost_kit_updated_seconds", "When this was written, since 1970.", now)
    end = certificate_end(kit, role)
    if end is not None:
        days = (end.timestamp() - now) / 86_400
        yield _one("veilboost_kit_certificate_days", "Days until the kit's certificate ends.", days)
    places = {"kit": kit}
    if role is Role.SITE:
        policy = policy_of(kit, role)
        places |= {"runs": policy.runs, "registry": policy.registry, "ledgers": policy.ledgers}
        yield from _of_memory(policy)
    free: dict[Labels, float] = {(("folder", name),): shutil.disk_usage(_there(at)).free for name, at in places.items()}
    yield Family("veilboost_kit_disk_free_bytes", "Space left where a folder lies.", free)


def _one(name: str, words: str, value: float) -> Family:
    return Family(name, words, {(): float(value)})


def _of_memory(policy: SitePolicy) -> Iterator[Family]:
    memory = policy.registry / NAME
    if memory.is_file():
        written = memory.stat().st_mtime
        yield _one("veilboost_kit_memory_updated_seconds", "When the site's memory was last written.", written)
    saved = last_backup(policy)
    if saved is not None:
        yield _one("veilboost_kit_backup_seconds", "When a backup was last made, since 1970.", saved)
    held: dict[Labels, float] = {}
    for path in ledger_files(policy.ledgers):
        jobs = Ledger(path, policy.ledger_heads).history().jobs
        held[(("data_set", path.stem),)] = sum(not one.closed for one in jobs)
    yield Family("veilboost_kit_open_reservations", "Jobs that hold a part of a privacy budget.", held)


def _there(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that is there."""
    return next(place for place in (folder, *folder.parents) if place.exists())


class Watch:
    """Writes the numbers of one kit. What goes wrong is a number, too: ``veilboost_kit_error`` is then 1."""

    def __init__(self, kit: Path, role: Role, who: str, folder: Path, processes: Path = _PROCESSES) -> None:
        self._kit, self._role, self._who, self._folder = kit, role, who, folder
        self._processes = processes
        self._file = MetricsFile(folder, who, "kit")

    def look(self, now: float) -> str:
        """Write once; return what is wrong, "" if nothing."""
        wrong, found = "", list[Family]()
        try:
            found.extend(families(self._kit, self._role, now, self._processes))  # up to what is wrong
        except (VeilBoostError, PrivacyError, OSError, ValueError) as error:
            wrong = str(error)
        found.append(_one("veilboost_kit_error", "1 if numbers are missing: see the watch's output.", bool(wrong)))
        self._file.write(rendered(found, (("who", self._who),)))
        self._end_lost(now)
        return wrong

    def _end_lost(self, now: float) -> None:
        """Say "lost" in the files of jobs whose processes were killed."""
        for path in self._folder.glob(f"veilboost_{self._who}_*.prom"):
            with suppress(OSError, UnicodeDecodeError):
                text = path.read_text()
                updated, lost = _UPDATED.search(text), with_state_lost(text)
                if updated is not None and lost is not None and now - float(updated[1]) >= SILENT_S:
                    status = path.stat()
                    replace_file(path, lost.encode())
                    os.utime(path, (status.st_atime, status.st_mtime))  # it goes a day after its job was lost


def run(kit: Path, role: Role, who: str, folder: Path, every_s: float | None) -> Iterator[str]:
    """Look again and again, or once without ``every_s``; yield what is wrong when it changes."""
    watch, before = Watch(kit, role, who, folder), None
    while True:
        wrong = watch.look(time.time())
        if wrong != before:
            yield wrong
        if every_s is None:
            return
        before = wrong
        time.sleep(every_s)
