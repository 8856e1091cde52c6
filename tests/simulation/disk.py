"""Disks of simulated machines: slow, full, or torn by a loss of power, which forgets what was not synced.

What a program writes is on the disk for certain when the file was synced, and its name when the folder was. At a loss
of power everything younger is there or not, file by file, as the dice fall: an unsynced file may be whole, cut or
empty, a renaming may have happened or not.

Not modelled: SQLite's own files, whose writes pass Python by (``tests/support/crashes.py`` ends processes in them), how
long it takes to remove the marks beside them, which is done under their locks like those writes, and folders, which are
there once they were made.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MARK = ".alive"
_BY_THEMSELVES = (".sqlite", ".sqlite-journal", ".parquet", ".lock", _MARK)

Fault = Callable[[str, int], str | float | None]
"""Called before each change of a disk, with the machine and how many there were before: "die", "full", "free",
seconds that it takes, or nothing."""


@dataclass
class Disk:
    """The disk of one machine, below one folder.

    Attributes:
        room: bytes that still fit; None for enough.
    """

    root: Path
    room: int | None = None
    _content: dict[int, bytes] = field(default_factory=dict)  # by inode, as synced
    _names: dict[Path, dict[str, int]] = field(default_factory=dict)  # by folder, as synced
    _before: dict[Path, bytes] = field(default_factory=dict)  # what a name stood for, while its folder is not synced
    _moved: dict[Path, Path] = field(default_factory=dict)  # by the new name the old one, as long

    def __post_init__(self) -> None:
        self.all_is_synced()

    def all_is_synced(self) -> None:
        """Take everything that is there now as being on the disk for certain."""
        self._content, self._names, self._before, self._moved = {}, {}, {}, {}
        for folder, _, names in os.walk(self.root):
            self.sync_folder(Path(folder))
            for path in (Path(folder) / name for name in names if _is_tracked(name)):
                self._content[path.stat().st_ino] = path.read_bytes()

    def synced(self, path: Path) -> None:
        """Take note that a file or a folder was synced."""
        if path.is_dir():
            self.sync_folder(path)
        else:
            self.sync_file(path, path.stat().st_ino)

    def sync_folder(self, folder: Path) -> None:
        """Take note that a folder was synced."""
        self._names[folder] = {entry.name: entry.inode() for entry in os.scandir(folder) if entry.is_file()}
        self._before = {path: content for path, content in self._before.items() if path.parent != folder}
        self._moved = {path: source for path, source in self._moved.items() if path.parent != folder}

    def sync_file(self, path: Path, inode: int) -> None:
        """Take note that a file was synced."""
        if path.exists() and _is_tracked(path.name):
            self._content[inode] = path.read_bytes()

    def forget_name(self, path: Path) -> None:
        """Take note that a name is about to stand for something else, or for nothing."""
        if path.exists() and _is_tracked(path.name) and path not in self._before:
            known = self._names.get(path.parent, {}).get(path.name)
            if known == path.stat().st_ino:
                self._before[path] = self._content.get(known, b"")

    def move_name(self, source: Path, target: Path) -> None:
        """Take note that a file is about to get another name: until its folder is synced it has one or the other."""
        if _is_tracked(target.name):
            self._moved[target] = source

    def lose_power(self, copy: Path, dice: random.Random) -> None:
        """Take from a copy of the disk what a loss of power takes."""
        for folder, names in sorted((Path(folder), names) for folder, _, names in os.walk(self.root)):
            target, synced = copy / folder.relative_to(self.root), self._names.get(folder, {})
            for name in sorted(filter(_is_tracked, names)):
                inode = (folder / name).stat().st_ino
                if synced.get(name) != inode and dice.random() < 0.5:
                    source = self._moved.get(folder / name)
                    if source is not None and not source.exists():
                        old = copy / source.relative_to(self.root)
                        old.write_bytes(self._left(inode, (folder / name).read_bytes(), dice))
                    self._undo(folder / name, target / name)
                else:
                    (target / name).write_bytes(self._left(inode, (folder / name).read_bytes(), dice))
            for path in sorted(self._before):
                if path.parent == folder and not path.exists() and dice.random() < 0.5:
                    (target / path.name).write_bytes(self._before[path])

    def _undo(self, path: Path, target: Path) -> None:
        if path in self._before:
            target.write_bytes(self._before[path])
        else:
            target.unlink()

    def _left(self, inode: int, written: bytes, dice: random.Random) -> bytes:
        synced = self._content.get(inode)
        if synced == written:
            return written
        if synced is not None and not written.startswith(synced):
            return dice.choice([synced, written])
        kept = len(synced or b"")
        return written[: kept + int(dice.choice([0.0, dice.random(), 1.0]) * (len(written) - kept))]


def _is_tracked(name: str) -> bool:
    return not name.endswith(_BY_THEMSELVES)


class Disks:
    """Stands between all machines' programs and their disks.

    Args:
        root_of: folder of a machine.
        owner: whose program runs now; None if it is nobody's.
        fault: what befalls a change.
        die: ends the machine whose program runs now; does not return.
        wait: lets virtual time pass.
    """

    def __init__(
        self,
        root_of: Callable[[str], Path],
        owner: Callable[[], str | None],
        fault: Fault,
        die: Callable[[str], None],
        wait: Callable[[float], None],
    ) -> None:
        self._root_of, self._owner, self._fault, self._die, self._wait = root_of, owner, fault, die, wait
        self.of: dict[str, Disk] = {}
        self.n_changes: dict[str, int] = {}

    def begin(self, owner: str) -> None:
        """Take a machine's disk as it is."""
        self.of[owner] = Disk(self._root_of(owner))

    def _place(self, what: object) -> tuple[str, Disk, Path] | None:
        """Return the machine, its disk and the path, if the running program changes its own machine's disk."""
        owner = self._owner()
        disk = self.of.get(owner or "")
        if owner is None or disk is None:
            return None
        path = Path(os.readlink(f"/proc/self/fd/{what}")) if isinstance(what, int) else Path(os.fsdecode(what))
        return (owner, disk, path) if path.is_relative_to(disk.root) else None

    def _befalls(self, owner: str, may_wait: bool) -> str | None:
        number = self.n_changes[owner] = self.n_changes.get(owner, 0) + 1
        fault = self._fault(owner, number)
        if isinstance(fault, float):
            if may_wait:
                self._wait(fault)
            return None
        if fault == "full" and self.of[owner].room is None:
            self.of[owner].room = 0
        if fault == "free":
            self.of[owner].room = None
        return fault if fault == "die" else None

    def _take_room(self, disk: Disk, n_bytes: int) -> None:
        if disk.room is not None:
            if disk.room < n_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            disk.room -= n_bytes

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let changes of disks pass through here."""
        real = {name: getattr(os, name) for name in ("fsync", "write", "replace", "rename", "unlink", "ftruncate")}

        def fsync(descriptor: int) -> None:
            place = self._place(descriptor)
            if place is None:
                return  # nobody waits for the real disk: its power stays on
            owner, disk, path = place
            if self._befalls(owner, may_wait=True) == "die":
                self._die(owner)
            facts = os.fstat(descriptor)
            if stat.S_ISDIR(facts.st_mode):
                disk.synced(path)
                return
            if path.name.endswith(".partial") and disk.room is not None and not path.name.endswith(".jsonl.partial"):
                self._take_room(disk, facts.st_size)  # written through a buffer, which passes this module by
            disk.sync_file(path, facts.st_ino)

        def write(descriptor: int, content: Any) -> int:
            place = self._place(descriptor)
            if place is None:
                return int(real["write"](descriptor, content))
            owner, disk, _ = place
            if self._befalls(owner, may_wait=False) == "die":
                real["write"](descriptor, bytes(content)[: len(content) // 2])
                self._die(owner)
            self._take_room(disk, len(content))
            return int(real["write"](descriptor, content))

        def naming(name: str) -> Callable[..., None]:
            def renamed(source: Any, target: Any, **named: Any) -> None:
                place = self._place(source)
                moved = (lambda: place[1].move_name(place[2], Path(target))) if place is not None else lambda: None

                def change() -> None:
                    real[name](source, target, **named)
                    moved()

                self._change(target, change)

            return renamed

        def unlink(path: Any, **named: Any) -> None:
            place = self._place(path)
            if place is not None and place[1].room is not None and place[2].exists():
                place[1].room += place[2].stat().st_size
            self._change(path, lambda: real["unlink"](path, **named))

        def ftruncate(descriptor: int, size: int) -> None:
            place = self._place(descriptor)
            if place is not None and self._befalls(place[0], may_wait=False) == "die":
                self._die(place[0])
            real["ftruncate"](descriptor, size)

        stand_ins = {
            "fsync": fsync,
            "write": write,
            "replace": naming("replace"),
            "rename": naming("rename"),
            "unlink": unlink,
            "ftruncate": ftruncate,
        }
        for name, stand_in in stand_ins.items():
            setattr(os, name, stand_in)
        try:
            yield
        finally:
            for name, function in real.items():
                setattr(os, name, function)

    def _change(self, path: Any, change: Callable[[], None]) -> None:
        place = self._place(path)
        if place is not None:
            owner, disk, named = place
            if self._befalls(owner, may_wait=not named.name.endswith(_MARK)) == "die":
                self._die(owner)
            disk.forget_name(named)
        change()
