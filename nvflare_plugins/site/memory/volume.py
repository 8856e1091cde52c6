"""Whether a volume can hold a site's memory: file locks must work there, for all machines that mount it.

SQLite keeps writers apart by locks of the system. Where these do nothing, two jobs could each release what only one of
them may, and no error would tell. So a folder is tried before its first use in a process: a lock that one descriptor
holds must keep another one out. What a trial on one machine cannot show, the volume's mount options say.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_NO_LOCKS = {  # by type of file system: options with which a lock stays on the machine that takes it
    "nfs": {"nolock", "local_lock=all", "local_lock=posix"},
    "nfs4": {"local_lock=all", "local_lock=posix"},
    "cifs": {"nobrl"},
    "smb3": {"nobrl"},
    "ceph": {"nolock"},
    "lustre": {"localflock"},
}
_ALWAYS_LOCAL = {  # where the kernel answers for the volume, on each machine for itself
    f"fuse.{name}" for name in ("sshfs", "s3fs", "mountpoint-s3", "gcsfuse", "goofys", "blobfuse2", "rclone")
}
_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock, 64 bits
_HELD = (errno.EACCES, errno.EAGAIN)


def why_no_locks(lock_file: Path) -> str | None:
    """Return what keeps locks from working in a file's folder, in words for its operator; None if they work.

    Args:
        lock_file: exists, and may be locked for a moment.
    """
    found = _local_only(lock_file.parent)
    if found is not None:
        return found
    try:
        return None if _keeps_others_out(lock_file) else "two may hold the same lock"
    except OSError as error:
        return f"locks fail with {errno.errorcode.get(error.errno or 0, 'an error')}"


def _keeps_others_out(lock_file: Path) -> bool:
    """Tell whether a lock keeps another one out; one that somebody holds already has done so."""
    with lock_file.open("r+b") as one, lock_file.open("r+b") as other:
        for file in (one, other):
            try:
                _lock(file.fileno())
            except OSError as error:
                if error.errno in _HELD:
                    return True
                raise
    return False


def _lock(descriptor: int) -> None:
    # SQLite's own locks belong to processes, so one process cannot try them; these are of the same kind otherwise.
    if hasattr(fcntl, "F_OFD_SETLK"):
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _local_only(folder: Path) -> str | None:
    """Return the type and option of a folder's mount that keep locks on this machine; None if nothing says so."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # a system that has no such list
        return None
    kind, options = _mount_of(folder.resolve(), lines)
    if kind in _ALWAYS_LOCAL:
        return kind
    local = _NO_LOCKS.get(kind, set()) & options
    return f"{kind} with {', '.join(sorted(local))}" if local else None


def _mount_of(folder: Path, lines: list[str]) -> tuple[str, set[str]]:
    """Return the type and the options of the mount in which a folder lies. See proc(5), mountinfo."""
    best, found = 0, ("", set[str]())
    for line in lines:
        place, described = (part.split(" ") for part in f"{line} - ".split(" - ")[:2])
        if len(place) < 6 or len(described) < 3:
            continue
        mount = place[4].encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")
        if folder.is_relative_to(mount) and len(mount) >= best:  # the later of two on one place lies on top
            best, found = len(mount), (described[0], {*place[5].split(","), *described[2].split(",")})
    return found
