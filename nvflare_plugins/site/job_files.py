"""What a job may bring into FLARE's workspace: two files of JSON, and FLARE's signatures of them.

FLARE reads more from a job's folder than it says (the table in flare/README.md). So nothing is looked for that is known
to be bad: what is not listed here is refused, before FLARE unpacks it and again before FLARE reads what was unpacked.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.checks import shown

CONFIG = "config"
_BOTH = frozenset({"format_version", "components", "task_data_filters", "task_result_filters"})
KEYS = {
    f"{CONFIG}/config_fed_client.json": _BOTH | {"executors"},
    f"{CONFIG}/config_fed_server.json": _BOTH | {"workflows", "dead_client_grace_period"},
}
"""The files of an app, and what each may say. FLARE takes any other key for a setting, and looks it up by its name."""
SIGNATURES = (".__nvfl_sig.json", ".__nvfl_submitter.crt")
FILES = frozenset([*KEYS, *SIGNATURES, *(f"{CONFIG}/{name}" for name in SIGNATURES)])
SEARCHED = ("comm_config", "resources", "fed_client", "fed_server")  # by FLARE, in the whole workspace
CODE = (".py", ".pyc", ".so")

_LARGEST, _LARGEST_JOB, _MOST_FILES = 16 << 20, 256 << 20, 10_000
_REFERENCE = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]*\}")
_APP = r"[A-Za-z0-9_.@-][A-Za-z0-9_.@ -]*"
JOB_ID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # FLARE's server draws UUIDs
_UNREADABLE = (BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, RuntimeError, ValueError)
_REMEDY = (
    "A job may bring config/config_fed_client.json, config/config_fed_server.json and FLARE's signatures of them, and "
    "nothing else. Remedy: leave it out; code is installed at sites, and their settings stand in their local folders."
)


def check_app(content: object, is_foreign: bool = False) -> None:
    """Check an app as it is sent to a site or server, before anything of it is unpacked.

    Args:
        content: the archive's bytes.
        is_foreign: jobs of FLARE's own components are let in, which may say more in the same files.

    Raises:
        ConfigurationError: it holds what a job may not bring, or cannot be read.
    """
    _check_archive(content, lambda name: name if name in FILES else None, {CONFIG}, is_foreign)


def check_job(content: object, is_foreign: bool = False) -> None:
    """Check a whole job as it is submitted to a server: ``meta.json``, and apps. As ``check_app``.

    Args:
        content: the archive's bytes or the path of its file.
    """
    folders: set[str] = set()

    def of_app(name: str) -> str | None:
        """Return the name within its app; None if a job may bring no file of this name."""
        job, _, rest = name.partition("/")
        if job in (".", "..") or not re.fullmatch(_APP, job):
            return None
        folders.add(job)
        if rest == "meta.json" or rest in SIGNATURES:
            return rest
        app, _, file = rest.partition("/")
        if app in (".", "..") or not re.fullmatch(_APP, app) or file not in FILES:
            return None
        folders.update((f"{job}/{app}", f"{job}/{app}/{CONFIG}"))
        return file

    _check_archive(content, of_app, folders, is_foreign)
    if len({folder.partition("/")[0] for folder in folders}) != 1:
        raise ConfigurationError("this job is no single folder with a meta.json in it")


def _check_archive(content: object, listed: Callable[[str], str | None], folders: set[str], is_foreign: bool) -> None:
    """Check every member of an archive: its name, kind and size, and what the two files say.

    Args:
        listed: returns the name of a file within its app; None refuses it.
        folders: the folders that may be there; complete once all files were looked at.
    """
    if not isinstance(content, (bytes, str)):
        raise ConfigurationError("this job is no archive")
    try:
        with ZipFile(io.BytesIO(content) if isinstance(content, bytes) else content) as archive:
            members = {member.orig_filename: member for member in archive.infolist()}
            n_members, n_bytes = len(archive.infolist()), sum(member.file_size for member in archive.infolist())
            if n_members > _MOST_FILES or n_bytes > _LARGEST_JOB:
                raise ConfigurationError(f"this job is too large: {n_members} files of {n_bytes} bytes")
            if len(members) != n_members:
                raise ConfigurationError("this job brings a file twice: export it anew")
            for name, member in members.items():
                inner = None if name.endswith("/") else listed(name)
                if not name.endswith("/") and (inner is None or not _is_plain(member, stat.S_IFREG)):
                    raise _refused(name)
                if member.file_size > _LARGEST:
                    raise _refused(name, f"of {member.file_size} bytes")
                if inner is not None:
                    _check_content(inner, archive.read(member), is_foreign)
            for name, member in members.items():
                is_listed = name[:-1] in folders and not member.file_size and _is_plain(member, stat.S_IFDIR)
                if name.endswith("/") and not is_listed:
                    raise _refused(name)
    except _UNREADABLE as error:
        raise ConfigurationError(f"this job cannot be unpacked ({type(error).__name__}): export it anew") from None


def _is_plain(member: ZipInfo, kind: int) -> bool:
    """Return whether a member is no link, device or encrypted, and what it is called is its whole name."""
    return (
        stat.S_IFMT(member.external_attr >> 16) in (0, kind)
        and member.filename == member.orig_filename
        and member.compress_type in (ZIP_STORED, ZIP_DEFLATED)
        and not member.flag_bits & 0x61
    )


def check_folder(app: Path, is_foreign: bool = False) -> None:
    """Check an app that was unpacked, before FLARE reads it. No link is followed. Raises: ConfigurationError."""
    if not stat.S_ISDIR(app.lstat().st_mode):
        raise _refused(app.name)
    for name, path in _below(app):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) and name in FILES) and not (stat.S_ISDIR(mode) and name == CONFIG):
            raise _refused(name)
    for name in KEYS:
        if (app / name).is_file():
            _check_content(name, (app / name).read_bytes(), is_foreign)


def _below(folder: Path) -> Iterator[tuple[str, Path]]:
    for root, folders, files in os.walk(folder):
        for name in sorted([*folders, *files]):
            path = Path(root, name)
            yield path.relative_to(folder).as_posix(), path


def _check_content(name: str, content: bytes, is_foreign: bool) -> None:
    """Check what one of the two files says; the others FLARE only compares.

    FLARE puts the environment's variables, and other values, where a text has braces.
    """
    if name not in KEYS:
        return
    try:
        document = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{name} cannot be read as JSON ({type(error).__name__})") from None
    if not isinstance(document, dict):
        raise ConfigurationError(f"{name} must hold a JSON object")
    unknown = [key for key in document if not (key.isidentifier() if is_foreign else key in KEYS[name])]
    if unknown:
        raise ConfigurationError(
            f"{name} says {shown(unknown[0])}, which FLARE would take for a setting of its own. A job may say "
            f"{', '.join(sorted(KEYS[name]))}. Remedy: leave it out."
        )
    check_references(document, name, is_foreign)


def check_references(document: object, name: str, is_foreign: bool = False) -> None:
    """Refuse texts in which FLARE would put values of the environment, of files or of other settings.

    Args:
        is_foreign: references to plain names, such as ``{SITE_NAME}``, may stand.

    Raises:
        ConfigurationError: a text has a brace.
    """
    rest = [document]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest += value.values()
        elif isinstance(value, (list, tuple)):
            rest += value
        elif isinstance(value, str) and re.search("[{}]", _REFERENCE.sub("", value) if is_foreign else value):
            raise ConfigurationError(
                f"{name} has a text with a brace: {shown(value)}. FLARE would put other values there, of the site's "
                "environment too. Remedy: a name without { and }."
            )


def _refused(name: str, how: str = "") -> ConfigurationError:
    return ConfigurationError(f"this job brings {shown(name)}{f' {how}' if how else ''}. {_REMEDY}")


def leftovers(workspace: Path, is_foreign: bool = False) -> list[str]:
    """Return what lies in old jobs' folders of a workspace and FLARE could read or run at its next start.

    That is what no job may bring, in an app's folder; elsewhere, files that FLARE looks for in the whole workspace,
    Python and links. What jobs themselves have written (logs, metrics, models) is no matter.

    Args:
        is_foreign: jobs of FLARE's own components are let in, which may write into their apps' folders.
    """
    found = []
    for folder in sorted(workspace.iterdir()) if workspace.is_dir() else ():
        if folder.is_file() and (folder.suffix in CODE or folder.name.startswith(SEARCHED[1:])):
            found.append(folder.name)
        if not folder.is_dir() or not (JOB_ID.fullmatch(folder.name) or (folder / "fl_app.txt").exists()):
            continue
        for name, path in _below(folder):
            app, _, rest = name.partition("/")
            is_unlisted = app.startswith("app_") and bool(rest) and rest not in FILES | {CONFIG} and not is_foreign
            if is_unlisted or path.name.startswith(SEARCHED) or path.suffix in CODE or path.is_symlink():
                found.append(f"{folder.name}/{name}")
    return found
