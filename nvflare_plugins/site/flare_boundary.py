"""What a site or server lets FLARE do: which components a job may name, who may run commands, what guards its process.

FLARE builds every callable that a site's allow-list covers, with arguments of the job's choosing and in the site's
workspace. An entry covers its own name and whatever follows it after a dot, so that only names of classes are safe.
``veilboost site-setup`` writes what stands here, every job checks it before it begins (``check_set_up``), and the tests
hold FLARE's own rules against it.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from nvflare.apis.fl_constant import AdminCommandNames
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.fuel.sec.authz import FalseEvaluator, TrueEvaluator, parse_policy_config
from nvflare.security.security import COMMAND_CATEGORIES, CommandCategory

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.checks import shown

_FLARE = "nvflare_plugins.flare"
EXECUTOR, CONTROLLER = f"{_FLARE}.executor.JobExecutor", f"{_FLARE}.controller.JobController"  # of any kind of job
_REMOVED = re.compile(  # the pairs of single kinds, which job folders and allow-lists before 0.12 name
    rf"{re.escape(_FLARE)}\.(alignment\.Alignment|bucket_ldp\.Bucket|dpboost\.DpBoost|horizontal\.Horizontal|"
    r"inference\.Inference|private_trees\.PrivateTrees|vertical\.Vertical)(Executor|Controller)"
)
TRACKING_RECEIVER = "nvflare.app_opt.tracking.tb.tb_receiver.TBAnalyticsReceiver"  # FLARE's only class in our jobs
OUR_PACKAGES = ("nvflare_plugins", "he_processors", "dp_components")

LOCAL = Path("local")
RESOURCES = LOCAL / "resources.json"
AUTHORIZATION = LOCAL / "authorization.json"
GUARD_FILE = LOCAL / "veilboost__p_resources.json"  # FLARE merges files of this name at the start of a parent process
JOB_GUARD_FILE = LOCAL / "veilboost__j_resources.json"  # and of this one at the start of a job's process
GUARD_STARTED = LOCAL / "veilboost_guard_started.json"  # written by the guard, removed by what needs a new start
SITE_GUARD_CLASS, JOB_GUARD_CLASS = f"{_FLARE}.site_guard.SiteGuard", f"{_FLARE}.components.JobGuard"
GUARD = {"components": [{"id": "veilboost_guard", "path": SITE_GUARD_CLASS, "args": {}}]}
JOB_GUARD = {"components": [{"id": "veilboost_job_guard", "path": JOB_GUARD_CLASS, "args": {}}]}
CLASS_PATHS: Mapping[str, tuple[str, ...]] = {
    EXECUTOR: ("kind",),
    CONTROLLER: ("job", "kind", "min_clients", "sites", "task_check_period"),
    TRACKING_RECEIVER: ("events", "tb_folder"),
    SITE_GUARD_CLASS: (),
    JOB_GUARD_CLASS: (),
}
"""All classes that job folders, allow-lists and set-up files name, with the arguments that these may give. The list is
public and frozen from 0.14 on: a path or argument may come, and none may go, so that releases run each other's jobs."""
COMM_CONFIG = "comm_config.json"  # the copy at a workspace's top is what FLARE finds first, guard or no guard

ALLOW_LIST, ALLOW_ALL = "class_allow_list", "*"
ENFORCEMENT, ENFORCE = "class_list_enforcement_mode", "enforce"
LOG_STREAMING = "allow_log_streaming"
BYOC, SHELL_COMMANDS = "byoc", CommandCategory.SHELL_COMMANDS
SHELL_RIGHTS = tuple(name for name, category in COMMAND_CATEGORIES.items() if category == SHELL_COMMANDS)
DENIED_RIGHTS = frozenset({BYOC, SHELL_COMMANDS, *SHELL_RIGHTS})
_NEVER = "none"
_FOLDER = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_ROLES = ("project_admin", "org_admin", "lead", "member")


class Role(Enum):
    """What a folder is."""

    SITE = "site"
    SERVER = "server"
    SIMULATOR = "simulator workspace"


_MONITORING = ("nvflare.metrics.job_metrics_collector.JobMetricsCollector",)
NOTHING_ELSE = "none"
EXTRAS: Mapping[str, Mapping[Role, tuple[str, ...]]] = {
    "monitoring": {
        Role.SITE: (*_MONITORING, "nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent"),
        Role.SERVER: (
            *_MONITORING,
            "nvflare.metrics.remote_metrics_receiver.RemoteMetricsReceiver",
            "nvflare.fuel_opt.statsd.statsd_reporter.StatsDReporter",
        ),
    },
    "mlflow": {Role.SITE: (), Role.SERVER: ("nvflare.app_opt.tracking.mlflow.mlflow_receiver.MLflowReceiver",)},
    "flare": {Role.SITE: DEFAULT_CLASS_ALLOW_LIST, Role.SERVER: DEFAULT_CLASS_ALLOW_LIST},
    NOTHING_ELSE: {Role.SITE: (), Role.SERVER: ()},
}
"""What ``site-setup --allow`` adds to the product's own components. FLARE's whole list holds executors that send what
they read as the job tells them, without our policy: it is for sites that run other jobs as well."""


def role_of(workspace: Path) -> Role:
    """Return what a workspace is; one without a startup kit is a simulator's."""
    if (workspace / "startup" / "fed_client.json").is_file():
        return Role.SITE
    return Role.SERVER if (workspace / "startup" / "fed_server.json").is_file() else Role.SIMULATOR


# -- components -------------------------------------------------------------------------------------------------------


def own_components(role: Role) -> tuple[str, ...]:
    """Return the classes that this product's jobs need: executors at sites; controllers and receiver at the server."""
    at_server = (CONTROLLER, TRACKING_RECEIVER)
    return {Role.SITE: (EXECUTOR,), Role.SERVER: at_server, Role.SIMULATOR: (EXECUTOR, *at_server)}[role]


def is_removed(path: object) -> bool:
    """Return whether a class is one of those that job folders before 0.12 name, and that are there no more."""
    return isinstance(path, str) and _REMOVED.fullmatch(path) is not None


def refuse_removed(path: object) -> None:
    """Refuse a class that is there no more. Raises: ConfigurationError."""
    if is_removed(path):
        raise ConfigurationError(
            f"the job folder names {path}, which version 0.12 removed: one pair of classes serves all kinds. Remedy: "
            "write the folder anew with this version (export the recipe)."
        )


def is_too_wide(entry: object) -> bool:
    """Return whether an entry lets a job call what is no component: of this product, of FLARE, or of Python itself."""
    if not isinstance(entry, str) or entry == ALLOW_ALL:
        return True
    if entry in (EXECUTOR, CONTROLLER):
        return False
    package, _, rest = entry.partition(".")
    if package in OUR_PACKAGES or package in sys.stdlib_module_names:
        return True
    return package == "nvflare" and not rest.rpartition(".")[2][:1].isupper()


def lets_others_in(workspace: Path) -> bool:
    """Return whether a site or server lets in jobs of FLARE's own components (``--allow flare``)."""
    resources = _read(workspace, RESOURCES)
    listed = resources.get(ALLOW_LIST) if isinstance(resources, dict) else None
    return isinstance(listed, list) and set(DEFAULT_CLASS_ALLOW_LIST) <= {str(entry) for entry in listed}


def merged_allow_list(current: Sequence[Any] | None, role: Role, extras: Sequence[str] = ()) -> list[str]:
    """Return a workspace's allow-list after set-up.

    What the site itself added stays unless it is too wide. FLARE's own entries stay only where an earlier set-up of
    this kind let them in: a list as provisioned, or with the prefix that older versions wrote, is cut down to this
    product.

    Args:
        extras: names of ``EXTRAS``; ``none`` takes FLARE's entries out again.
    """
    before = list(current or ())
    listed = [entry for entry in before if not is_removed(entry)]
    of_before = len(listed) < len(before) or EXECUTOR in before or CONTROLLER in before
    is_ours = of_before and not any(map(is_too_wide, listed))
    keeps_flares = is_ours and NOTHING_ELSE not in extras
    kept = [e for e in before if not is_too_wide(e) and (keeps_flares or not e.startswith(("nvflare.", *_OURS)))]
    roles = (Role.SITE, Role.SERVER) if role is Role.SIMULATOR else (role,)
    added = [name for extra in extras for each in roles for name in EXTRAS[extra][each]]
    merged = list(dict.fromkeys([*own_components(role), *added, *kept]))
    return before if set(merged) == set(before) else merged


_OURS = tuple(f"{package}." for package in OUR_PACKAGES)


# -- rights -----------------------------------------------------------------------------------------------------------


def without_denied(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return FLARE's authorization with custom code and shell commands denied to every role, all else as before.

    A role that has every right ("any") is given all others one by one, because FLARE looks no further at such a role.
    """
    permissions = document.get("permissions") or dict.fromkeys(_ROLES, "any")
    if not isinstance(permissions, dict):
        raise ConfigurationError(f"{AUTHORIZATION}: permissions must be an object")
    denied = {BYOC: _NEVER, SHELL_COMMANDS: _NEVER}
    changed = {}
    for role, rights in permissions.items():
        given = rights if isinstance(rights, dict) else dict.fromkeys(_all_rights(), rights)
        kept = {right: who for right, who in given.items() if _plain(right) not in DENIED_RIGHTS}
        changed[role] = {**kept, **denied}
    return {"format_version": "1.0", **document, "permissions": changed}


def granted(document: object) -> list[str]:
    """Return who has rights that no role may have, by FLARE's own reading of its authorization."""
    if not isinstance(document, dict):
        return ["nobody knows what, as it holds no JSON object"]
    try:
        policy, problem = parse_policy_config(document, COMMAND_CATEGORIES)
    except TypeError as error:
        policy, problem = None, str(error)
    if policy is None:
        return [f"nobody knows what, as FLARE cannot read it ({problem})"]
    found = []
    for role in policy.get_roles():
        rights = [right for right in (BYOC, *SHELL_RIGHTS) if _may(policy.role_right_map, role, right)]
        if rights:
            found.append(f"{role}: {', '.join(rights)}")
    return found


def _may(conditions: Mapping[str, Any], role: str, right: str) -> bool:
    """Return whether somebody of a role could have a right, whoever and wherever that is."""
    found = conditions.get(f"{role}:*") or conditions.get(f"{role}:{right}")
    if found is None or any(isinstance(each, TrueEvaluator) for each in found.blocked_conditions):
        return False
    return not found.allowed_conditions or not all(isinstance(e, FalseEvaluator) for e in found.allowed_conditions)


def _all_rights() -> list[str]:
    """Return FLARE's rights: its categories, and the commands that are in none."""
    commands = [name for key, name in vars(AdminCommandNames).items() if key.isupper()]
    return list(dict.fromkeys([*COMMAND_CATEGORIES.values(), *(c for c in commands if c not in COMMAND_CATEGORIES)]))


def _plain(right: object) -> str:
    return " ".join(str(right).lower().split())


# -- the check before every job ---------------------------------------------------------------------------------------


def check_set_up(workspace: Path, name: str) -> None:
    """Check that a site or server is set up as ``veilboost site-setup`` leaves it.

    New provisioning, ``nvflare deploy prepare`` and hand-made changes put FLARE's defaults back while the site's policy
    still lies there. In the simulator there are no rights to check.

    Raises:
        ConfigurationError: something is missing; the message names it and the command.
    """
    found = list(gaps(workspace))
    if found:
        raise ConfigurationError(
            f"{name} is not completely set up for VeilBoost jobs: {'; '.join(found)}. Remedy: run `veilboost "
            "site-setup DIR` on its workspace, and restart it if it is no simulator."
        )


def check_tracking(components: Iterable[object]) -> None:
    """Refuse a tracking receiver that a job has write its files elsewhere than in the job's own folder at the server.

    FLARE's receiver writes nothing there by itself, but only its log says so, and the job would go on without.

    Raises:
        ConfigurationError: its ``tb_folder`` is absolute, leads upwards or is no name of folders.
    """
    for component in components:
        folder = getattr(component, "tb_folder", "tb_events")
        if not isinstance(folder, str) or not _FOLDER.fullmatch(folder) or ".." in folder.split("/"):
            raise ConfigurationError(
                f"the job's tracking receiver writes to {shown(folder)}, and may only write below the job's own "
                "folder. Remedy: leave tb_folder out, or give a relative path of letters, digits and _ . - without "
                "'..'."
            )


def gaps(workspace: Path) -> Iterator[str]:
    """Yield what is missing in a workspace, one clause for each."""
    role = role_of(workspace)
    resources = _read(workspace, RESOURCES)
    if isinstance(resources, dict):
        yield from _list_gaps(resources, role)
        if role is not Role.SERVER and resources.get(LOG_STREAMING, True) is not False:
            yield f"log files stream to the server ({LOG_STREAMING})"
    else:
        yield f"{RESOURCES} is missing or unreadable"
    if role is Role.SIMULATOR:
        return
    rights = granted(_read(workspace, AUTHORIZATION))
    if rights:
        yield f"{AUTHORIZATION} grants {' and '.join(rights)}"
    yield from _guard_gaps(workspace)
    try:
        is_copied = has_comm_config(workspace)
    except ConfigurationError as error:
        yield str(error)
    else:
        if not is_copied:
            yield f"{COMM_CONFIG} at its top, which FLARE reads, is not what {LOCAL / COMM_CONFIG} says, or not empty"


def _guard_gaps(workspace: Path) -> Iterator[str]:
    if _read(workspace, GUARD_FILE, default=False) != GUARD:
        yield f"the guard of FLARE's process ({GUARD_FILE}) is missing"
    elif _read(workspace, JOB_GUARD_FILE, default=False) != JOB_GUARD:
        yield f"the guard of its jobs' processes ({JOB_GUARD_FILE}) is missing"
    elif not (workspace / GUARD_STARTED).is_file():
        yield "it was not restarted after the set-up"


def has_comm_config(workspace: Path) -> bool:
    """Return whether a site's own settings of FLARE's messages stand at its workspace's top. As ``comm_config_of``."""
    top, wanted = workspace / COMM_CONFIG, comm_config_of(workspace)
    return not top.is_symlink() and top.is_file() and top.read_bytes() == wanted


def comm_config_of(workspace: Path) -> bytes:
    """Return a site's own settings of FLARE's messages, as they are to stand at the workspace's top.

    Raises:
        ConfigurationError: they stand in a format that is not read here.
    """
    local = workspace / LOCAL
    others = [path for path in local.glob("comm_config.*") if path.name not in (COMM_CONFIG, f"{COMM_CONFIG}.default")]
    if others:
        raise ConfigurationError(f"{others[0]} is in a format that is not read here: write it as {COMM_CONFIG}")
    for path in (local / COMM_CONFIG, local / f"{COMM_CONFIG}.default"):
        if path.is_file():
            return path.read_bytes()
    return b"{}\n"


def _list_gaps(resources: Mapping[str, Any], role: Role) -> Iterator[str]:
    listed = resources.get(ALLOW_LIST)
    if not isinstance(listed, list):
        yield f"there is no {ALLOW_LIST}"
        return
    wide = [str(entry) for entry in listed if is_too_wide(entry)]
    if wide:
        yield f"{ALLOW_LIST} has {', '.join(wide)}"
    if not set(own_components(role)) <= {str(entry) for entry in listed}:
        yield f"{ALLOW_LIST} lacks components of VeilBoost"
    if resources.get(ENFORCEMENT) != ENFORCE:
        yield f"{ENFORCEMENT} is not {ENFORCE}"


def _read(workspace: Path, file: Path, *, default: bool = True) -> object:
    """Return a JSON file of a workspace, or FLARE's default for it as FLARE would; None if neither can be read."""
    for path in (workspace / file, workspace / f"{file}.default")[: 2 if default else 1]:
        if path.is_file():
            try:
                return json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return None
    return None


# What a job may bring into FLARE's workspace: two files of JSON, and FLARE's signatures of them.
#
# FLARE reads more from a job's folder than it says (the table in flare/README.md). So nothing is looked for that is
# known to be bad: what is not listed here is refused, before FLARE unpacks it and again before FLARE reads what was
# unpacked.


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


def check_app(content: object, *, is_foreign: bool = False) -> None:
    """Check an app as it is sent to a site or server, before anything of it is unpacked.

    Args:
        content: the archive's bytes.
        is_foreign: jobs of FLARE's own components are let in, which may say more in the same files.

    Raises:
        ConfigurationError: it holds what a job may not bring, or cannot be read.
    """
    _check_archive(content, lambda name: name if name in FILES else None, {CONFIG}, is_foreign=is_foreign)


def check_job(content: object, *, is_foreign: bool = False) -> None:
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

    _check_archive(content, of_app, folders, is_foreign=is_foreign)
    if len({folder.partition("/")[0] for folder in folders}) != 1:
        raise ConfigurationError("this job is no single folder with a meta.json in it")


def _check_archive(
    content: object, listed: Callable[[str], str | None], folders: set[str], *, is_foreign: bool
) -> None:
    """Check every member of an archive: its name, kind and size, and what the two files say.

    Args:
        listed: returns the name of a file within its app; None refuses it.
        folders: the folders that may be there; complete once all files were looked at.
    """
    if not isinstance(content, (bytes, str)):
        raise ConfigurationError("this job is no archive")
    try:
        with ZipFile(io.BytesIO(content) if isinstance(content, bytes) else content) as archive:
            members = _members(archive)
            for name, member in members.items():
                inner = None if name.endswith("/") else listed(name)
                if not name.endswith("/") and (inner is None or not _is_plain(member, stat.S_IFREG)):
                    raise _refused(name)
                if member.file_size > _LARGEST:
                    raise _refused(name, f"of {member.file_size} bytes")
                if inner is not None:
                    _check_content(inner, archive.read(member), is_foreign=is_foreign)
            _check_folders(members, folders)
    except _UNREADABLE as error:
        raise ConfigurationError(f"this job cannot be unpacked ({type(error).__name__}): export it anew") from None


def _members(archive: ZipFile) -> dict[str, ZipInfo]:
    """Return the members by their whole names. Raises: ConfigurationError: too many, too large, or one twice."""
    members = {member.orig_filename: member for member in archive.infolist()}
    n_members, n_bytes = len(archive.infolist()), sum(member.file_size for member in archive.infolist())
    if n_members > _MOST_FILES or n_bytes > _LARGEST_JOB:
        raise ConfigurationError(f"this job is too large: {n_members} files of {n_bytes} bytes")
    if len(members) != n_members:
        raise ConfigurationError("this job brings a file twice: export it anew")
    return members


def _check_folders(members: Mapping[str, ZipInfo], folders: set[str]) -> None:
    for name, member in members.items():
        is_listed = name[:-1] in folders and not member.file_size and _is_plain(member, stat.S_IFDIR)
        if name.endswith("/") and not is_listed:
            raise _refused(name)


def _is_plain(member: ZipInfo, kind: int) -> bool:
    """Return whether a member is no link, device or encrypted, and what it is called is its whole name."""
    return (
        stat.S_IFMT(member.external_attr >> 16) in (0, kind)
        and member.filename == member.orig_filename
        and member.compress_type in (ZIP_STORED, ZIP_DEFLATED)
        and not member.flag_bits & 0x61
    )


def check_folder(app: Path, *, is_foreign: bool = False) -> None:
    """Check an app that was unpacked, before FLARE reads it. No link is followed. Raises: ConfigurationError."""
    if not stat.S_ISDIR(app.lstat().st_mode):
        raise _refused(app.name)
    for name, path in _below(app):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) and name in FILES) and not (stat.S_ISDIR(mode) and name == CONFIG):
            raise _refused(name)
    for name in KEYS:
        if (app / name).is_file():
            _check_content(name, (app / name).read_bytes(), is_foreign=is_foreign)


def _below(folder: Path) -> Iterator[tuple[str, Path]]:
    for root, folders, files in os.walk(folder):
        for name in sorted([*folders, *files]):
            path = Path(root, name)
            yield path.relative_to(folder).as_posix(), path


def _check_content(name: str, content: bytes, *, is_foreign: bool) -> None:
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
    check_references(document, name, is_foreign=is_foreign)
    for text in _texts(document):
        refuse_removed(text)


def check_references(document: object, name: str, *, is_foreign: bool = False) -> None:
    """Refuse texts in which FLARE would put values of the environment, of files or of other settings.

    Args:
        is_foreign: references to plain names, such as ``{SITE_NAME}``, may stand.

    Raises:
        ConfigurationError: a text has a brace.
    """
    for value in _texts(document):
        if re.search("[{}]", _REFERENCE.sub("", value) if is_foreign else value):
            raise ConfigurationError(
                f"{name} has a text with a brace: {shown(value)}. FLARE would put other values there, of the site's "
                "environment too. Remedy: a name without { and }."
            )


def _texts(document: object) -> Iterator[str]:
    """Yield every value within a document that is a text."""
    rest = [document]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest += value.values()
        elif isinstance(value, (list, tuple)):
            rest += value
        elif isinstance(value, str):
            yield value


def _refused(name: str, how: str = "") -> ConfigurationError:
    return ConfigurationError(f"this job brings {shown(name)}{f' {how}' if how else ''}. {_REMEDY}")


def leftovers(workspace: Path, *, is_foreign: bool = False) -> list[str]:
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
