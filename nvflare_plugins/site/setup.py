"""What a site's FLARE workspace needs for VeilBoost jobs, and what it has."""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509

from dp_components.ledger import is_ledger_name
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.checks import shown
from nvflare_plugins.base.declared import description_of
from nvflare_plugins.base.files import make_folder, write_atomically
from nvflare_plugins.data.declaration import MISSING_TEXTS, VerticalRules, known_files
from nvflare_plugins.site import flare_boundary
from nvflare_plugins.site.flare_boundary import Role
from nvflare_plugins.site.policy import SitePolicy, note_policy, template
from nvflare_plugins.site.policy_values import POLICY_FILE, Consents
from nvflare_plugins.site.profiles import DEFAULT_PROFILES, PROFILES
from nvflare_plugins.site.runtimes import KEPT, Mounts, Runtime, is_prepared, run_gaps, runtime_of, site_name

# Merging what a site needs to run VeilBoost jobs into its FLARE workspace: ``veilboost site-setup DIR``.
#
# Which files are touched, and how, is told to who asks for help (cli/sites.py). Calling it again changes nothing
# more. Running jobs keep what they started with; FLARE reads rights and guard when it starts. Jobs refuse to begin
# where any of this is missing.


_SHOWN = 5


@dataclass(frozen=True, slots=True)
class SetupOptions:
    """What the options ask for; empty means "leave as it is".

    Attributes:
        data_sets: name -> absolute path, which may hold ``{site}``.
        ids: name of a data set -> the column that names its rows.
        budgets: name of a data set -> what all private jobs together may spend on it, by the policy's keys
            (``PrivacyBudget``).
        allow: names of ``flare_boundary.EXTRAS``: what FLARE may start besides VeilBoost's own components.
        keep_in: absolute folder for runs, registry and ledgers, outside FLARE's workspace; may hold ``{site}``.
        readers: name of a data set -> how its file is read, by the policy's keys (``DataSet``). Dictionaries are added
            to what the policy says, and so are texts of ``missing``, to the default ones where it says nothing.
        statement: the site's own words for its data-protection officer, by the policy's keys (``DataProtection``).
        added_profiles: profiles to allow beside those that the policy allows.
        snapshots: name of a snapshot -> where its rows come from, by the policy's keys (``SnapshotSource``).
        policy: keys of a policy with what they shall be; where a key holds others, such as ``data_sets``, only those
            that are named change. The other options come on top.
    """

    data_sets: Mapping[str, str] = field(default_factory=dict)
    profiles: tuple[str, ...] = ()
    consents: tuple[str, ...] = ()
    min_sites: int | None = None
    max_colluders: int | None = None
    ids: Mapping[str, str] = field(default_factory=dict)
    budgets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    allow: tuple[str, ...] = ()
    keep_in: str | None = None
    readers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    statement: Mapping[str, str] = field(default_factory=dict)
    added_profiles: tuple[str, ...] = ()
    snapshots: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)


def set_up(folder: Path, options: SetupOptions = SetupOptions()) -> list[str]:
    """Set up every workspace that a folder stands for.

    Args:
        folder: a simulator workspace (may be empty or not exist yet), a POC workspace or one project of it, or the
            startup kit of one production site or server.

    Returns:
        One sentence per change; empty if there was nothing to do.

    Raises:
        ConfigurationError: the folder is none of these, or a file in it cannot be used.
    """
    changes: list[str] = []
    check_place(folder)
    for path, role in workspaces(folder):
        changes += _merge_resources(path, role, options.allow)
        if role is not Role.SIMULATOR:
            changes += _close_process(path, role)
        if role is not Role.SERVER:
            changes += _merge_policy(path, role, options)
        if role is Role.SITE:
            note_policy(policy_of(path, role), "site-setup")
    return changes


def check_place(folder: Path) -> None:
    """Refuse a workspace whose path FLARE cannot start jobs in: it makes the process's arguments from one line of text.

    Raises:
        ConfigurationError: the path has a space, a quote, a backslash or a #.
    """
    if re.search(r"[\s'\"\\#]", str(folder.absolute())):
        raise ConfigurationError(
            f"{folder.absolute()}: FLARE starts no job in a folder whose path has a space, a quote, a backslash or "
            "a #. Remedy: put the workspace elsewhere; files of data may lie anywhere."
        )


def workspaces(folder: Path) -> list[tuple[Path, Role]]:
    """Return the workspaces that a folder stands for, with their roles.

    Raises:
        ConfigurationError: the folder stands for none.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"{folder} is not a folder")
    kits = list(_kits(folder))
    if kits:
        return kits
    startup = folder / "startup"
    if (startup / "fed_admin.json").is_file():
        raise ConfigurationError(f"{folder} is the kit of an administrator, which runs no jobs")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not names or names & {"local", "simulate_job"} or "server" in names:
        return [(folder, Role.SIMULATOR)]
    raise ConfigurationError(
        f"{folder} is no FLARE workspace: give a simulator workspace (or an empty folder to become one), a POC "
        "workspace, or the startup kit of a site"
    )


def _kits(folder: Path) -> Iterator[tuple[Path, Role]]:
    """Find startup kits: the folder itself, or those in the newest prod_NN folder of each project below it."""
    candidates = [folder]
    if flare_boundary.role_of(folder) is Role.SIMULATOR:
        candidates = [path for production in _newest_productions(folder) for path in sorted(production.iterdir())]
    for path in candidates:
        role = flare_boundary.role_of(path)
        if role is not Role.SIMULATOR:
            yield path, role


def _newest_productions(folder: Path) -> list[Path]:
    if folder.name.startswith("prod_"):
        return [folder]
    newest: dict[Path, Path] = {}
    for path in sorted([*folder.glob("prod_*"), *folder.glob("*/prod_*")]):
        if path.is_dir():
            newest[path.parent] = path
    return sorted(newest.values())


def _merge_resources(workspace: Path, role: Role, extras: tuple[str, ...]) -> list[str]:
    path = workspace / flare_boundary.RESOURCES
    document = _read_with_default(path) or {"format_version": 2}
    before = document.get(flare_boundary.ALLOW_LIST)
    if before is not None and not isinstance(before, list):
        raise ConfigurationError(f"{path}: {flare_boundary.ALLOW_LIST} must be a list")
    changes = []
    allowed = flare_boundary.merged_allow_list(before, role, extras)
    if allowed != before:
        document[flare_boundary.ALLOW_LIST] = allowed
        gone = [str(entry) for entry in before or () if entry not in allowed]
        taken = f"; taken out: {len(gone)}, such as {gone[0]}" if gone else ""
        changes.append(f"{path}: FLARE may start {len(allowed)} classes, each by its exact name{taken}")
    if document.get(flare_boundary.ENFORCEMENT) != flare_boundary.ENFORCE:
        document[flare_boundary.ENFORCEMENT] = flare_boundary.ENFORCE
        changes.append(f"{path}: nothing else may start ({flare_boundary.ENFORCEMENT} is {flare_boundary.ENFORCE})")
    if role is not Role.SERVER and document.get(flare_boundary.LOG_STREAMING, True) is not False:
        document[flare_boundary.LOG_STREAMING] = False
        changes.append(f"{path}: log files stay at the site ({flare_boundary.LOG_STREAMING} is false)")
    if changes:
        _write_json(path, document)
    return changes


def _close_process(workspace: Path, role: Role) -> list[str]:
    """Deny custom code and shell commands, and see to it that the guard starts with FLARE."""
    changes = []
    path = workspace / flare_boundary.AUTHORIZATION
    document = _read_with_default(path)
    if flare_boundary.granted(document):
        closed = flare_boundary.without_denied(document or {})
        still = flare_boundary.granted(closed)
        if still:
            raise ConfigurationError(f"{path} cannot be closed: {'; '.join(still)}")
        _write_json(path, closed)
        changes.append(f"{path}: custom code and shell commands are denied to every role")
    for file, guard, whose in (
        (flare_boundary.GUARD_FILE, flare_boundary.GUARD, "FLARE's process"),
        (flare_boundary.JOB_GUARD_FILE, flare_boundary.JOB_GUARD, "each job's process"),
    ):
        path = workspace / file
        if not path.is_file() or _read_object(path) != guard:
            _write_json(path, guard)
            changes.append(f"{path}: a guard starts with {whose}")
    path = workspace / flare_boundary.COMM_CONFIG
    if not flare_boundary.has_comm_config(workspace):
        write_atomically(path, flare_boundary.comm_config_of(workspace))
        changes.append(f"{path}: as local/{path.name} says, or empty; FLARE finds it before any other of this name")
    if changes:
        (workspace / flare_boundary.GUARD_STARTED).unlink(missing_ok=True)
        changes.append(
            f"{workspace}: restart this {role.value} if it runs, as FLARE reads rights and guard when it starts"
        )
    return changes


def warnings_of(folder: Path) -> list[str]:
    """Return what an administrator should know: of old jobs' folders, budgets, and data and results in a kit."""
    found = []
    for path, role in workspaces(folder):
        found += [f"WARNING {path}: {text}" for text in leftover_gaps(path, role)]
        if role is not Role.SERVER and (path / POLICY_FILE).is_file():
            policy = policy_of(path, role)
            gaps = [*budget_gaps(policy), *(_inside(path, policy) if role is Role.SITE else ())]
            found += [f"WARNING {policy.site}: {text}" for text in gaps]
        found += [
            f"NOTE {kit}: a kit of its own, written by `nvflare deploy prepare`; set it up too if you start it"
            for kit in sorted(path.glob("prepared/*/"))
        ]
    return found


def leftover_gaps(workspace: Path, role: Role) -> Iterator[str]:
    """Yield a sentence if old jobs have left what FLARE could read or run at its next start; nothing in a simulator."""
    left = (
        []
        if role is Role.SIMULATOR
        else flare_boundary.leftovers(workspace, is_foreign=flare_boundary.lets_others_in(workspace))
    )
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        yield (
            f"old jobs' folders hold what no job may bring, and FLARE could run it when it starts: "
            f"{', '.join(map(shown, left[:_SHOWN]))}{more}. Stop FLARE here, keep a copy if you want to know who sent "
            "it, delete these folders, and do what SECURITY.md says under Advisories."
        )


def budget_gaps(policy: SitePolicy) -> Iterator[str]:
    """Yield a sentence where private jobs on a data set with a budget will be refused, whatever they ask for."""
    for name, spec in policy.data_sets.items():
        if spec.privacy is not None and not is_ledger_name(name):
            yield (
                f"data set {name!r} has a budget and a name that no ledger can have: give it one of letters of ASCII, "
                "digits and _ . @ + -"
            )
    with_budget = {
        name: spec for name, spec in policy.data_sets.items() if spec.privacy and not spec.privacy.own_persons
    }
    unnamed = [name for name, spec in with_budget.items() if spec.id is None]
    if unnamed and len(with_budget) > 1:
        yield (
            f"data sets {', '.join(with_budget)} have budgets, and of these {', '.join(unnamed)} without a column of "
            "persons: whichever is spent on first shuts the others out, as persons of it might be in them. Name the "
            "column before the first job (--id), or vouch that nobody is in two of them (own_persons=true in --budget)."
        )


def _inside(workspace: Path, policy: SitePolicy) -> Iterator[str]:
    """Yield what lies in FLARE's workspace, through a link or not: FLARE's server can delete or reach folders there."""
    for name, data_set in policy.data_sets.items():
        if _lies_in(data_set.path, workspace):
            yield (
                f"data set {name!r} lies in FLARE's workspace or is linked into it. The guard keeps the console out; "
                "without it, FLARE's shell commands read every file there. Keep data elsewhere."
            )
    inside = [key for key in KEPT if _lies_in(getattr(policy, key), workspace)]
    if inside:
        deleted = ", and the next `nvflare deploy prepare` deletes this kit with them" if is_prepared(workspace) else ""
        yield (
            f"{', '.join(inside)} lie in FLARE's workspace. The guard keeps FLARE's server from deleting them{deleted}"
            "; `--keep-in DIR` puts them elsewhere (move what is there already first)."
        )


def _lies_in(path: Path, folder: Path) -> bool:
    lexical = Path(os.path.normpath(path))
    return lexical.is_relative_to(folder.absolute()) or lexical.resolve().is_relative_to(folder.resolve())


def _merge_policy(workspace: Path, role: Role, options: SetupOptions) -> list[str]:
    path = workspace / POLICY_FILE
    exists = path.is_file()
    document = _read_object(path) if exists else json.loads(template())
    changes = [] if exists else [f"{path}: new policy, strict by default"]
    if not exists and role is Role.SIMULATOR:
        document["unsigned_sessions"] = True
        document["share_data_errors"] = True  # all simulated sites are the same person's, who wants to know what failed
        document["inputs"] = str((workspace / "local" / "inputs").absolute())
        changes.append(f"{path}: sessions without certificates are accepted, as simulated sites have none")
    site = "site" if role is Role.SIMULATOR else site_name(workspace)
    before = SitePolicy.from_dict(document, workspace=workspace, site=site)
    has_heads = before.ledger_heads.is_dir() and any(before.ledger_heads.iterdir())
    for key, value in _wanted(document, options, has_heads=has_heads):
        changes.append(f"{path}: {key} = {json.dumps(value)}")
    after = SitePolicy.from_dict(document, workspace=workspace, site=site)
    _check_nothing_is_forgotten(before, after)
    lacking = list(run_gaps(workspace, after)) if role is Role.SITE else []
    if lacking:
        raise ConfigurationError(f"{workspace}, whose jobs run in containers: {'; '.join(lacking)}")
    if changes:
        _write_json(path, document)
    return changes


def _check_nothing_is_forgotten(before: SitePolicy, after: SitePolicy) -> None:
    """Refuse to leave behind what a site remembers of releases and of privacy spent."""
    for key in (*KEPT, "ledger_heads"):
        old, new = getattr(before, key), getattr(after, key)
        files = (path for path in old.rglob("*") if path.is_file() and not path.is_relative_to(after.ledger_heads))
        if old != new and any(not (new / path.relative_to(old)).exists() for path in files):
            raise ConfigurationError(f"{key}: move {old} to {new} first, or what it holds would be forgotten")


def _wanted(document: dict[str, Any], options: SetupOptions, *, has_heads: bool) -> Iterator[tuple[str, Any]]:
    """Apply the options to a policy; yield what really changed.

    Args:
        has_heads: the heads of ledgers are there already; they stay, because a ledger without its head is refused.
    """
    yield from _changed(document, options.policy)
    profiles = list(options.profiles)
    if options.added_profiles:
        profiles = added(
            profiles or document.get("allowed_profiles", list(DEFAULT_PROFILES)), [*options.added_profiles]
        )
    plain: dict[str, Any] = {
        "allowed_profiles": profiles or None,
        "min_sites": options.min_sites,
        "max_colluders": options.max_colluders,
    }
    if options.keep_in is not None:
        plain |= {key: f"{options.keep_in}/{{site}}/veilboost_{key}" for key in KEPT}
        if not has_heads:
            plain["ledger_heads"] = f"{options.keep_in}/{{site}}/veilboost_registry/ledger_heads"
    yield from _changed(document, {key: value for key, value in plain.items() if value is not None})
    for (*place, key), value in _nested(options):
        entry = document
        for name in place:
            entry = entry.setdefault(name, {})
        before = entry.get(key, list(MISSING_TEXTS) if key == "missing" else None)
        wanted = value if key == "names" else added(before, value)  # other names are names in place of the old ones
        if entry.get(key) != wanted:
            entry[key] = wanted
            yield ".".join((*place, key)), wanted


def _nested(options: SetupOptions) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield what the options say of keys below others: the way to each, and its value."""
    for name, source in options.snapshots.items():
        yield from ((("snapshots", name, key), value) for key, value in source.items())
    for key, of_sets in (("path", options.data_sets), ("id", options.ids), ("privacy", options.budgets)):
        yield from ((("data_sets", name, key), value) for name, value in of_sets.items())
    for name, reader in options.readers.items():
        yield from ((("data_sets", name, key), value) for key, value in reader.items())
    yield from ((("data_protection", key), text) for key, text in options.statement.items())
    for key, _, number in (name.partition("=") for name in options.consents):
        yield ("consents", key), int(number) if number else True


def _changed(document: dict[str, Any], wanted: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Set keys of a policy, and those below them one by one; yield what really changed."""
    for key, value in wanted.items():
        if isinstance(value, Mapping) and isinstance(document.setdefault(key, {}), dict):
            yield from _changed(document[key], value, f"{place}{key}.")
        elif document.get(key) != value:
            document[key] = value
            yield f"{place}{key}", value


def added(before: Any, value: Any) -> Any:
    """Return what an option says with what the policy says already, where it can say several things."""
    if isinstance(value, Mapping):
        return {**(before or {}), **value}
    return list(dict.fromkeys([*before, *value])) if isinstance(value, list) else value


def check_files(folder: Path, data_sets: Mapping[str, str]) -> None:
    """Refuse data sets whose file is not there: each job would find that out by itself.

    What jobs in containers see under another path is looked at where it lies on this machine.

    Raises:
        ConfigurationError: one is missing; at a simulator's workspace, which names no sites yet, at every site.
    """
    for path, role in workspaces(folder):
        for name, file in data_sets.items():
            pattern = file.replace("{site}", "*" if role is Role.SIMULATOR else site_name(path))
            place = here(path, Path(pattern))
            is_there = place is not None and (place.exists() or bool(glob.glob(str(place))))
            if role is not Role.SERVER and place is not None and not is_there:
                raise ConfigurationError(f"data set {name!r}: there is no file {place}: mend the path in --data-set")


def here(workspace: Path, path: Path) -> Path | None:
    """Return where what a job names lies on this machine; None where this machine cannot tell."""
    if runtime_of(workspace) is Runtime.PROCESS:
        return path
    found = Mounts(workspace).of(path)
    return None if found is None else found[0]


def _read_with_default(path: Path) -> dict[str, Any] | None:
    """Return a file of FLARE or, as FLARE does, the default beside it; None if there is neither."""
    for source in (path, path.with_name(f"{path.name}.default")):
        if source.is_file():
            return _read_object(source)
    return None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON ({type(error).__name__})") from None
    if not isinstance(document, dict):
        raise ConfigurationError(f"{path} must hold a JSON object")
    return document


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    make_folder(path.parent)
    write_atomically(path, json.dumps(document, indent=2).encode() + b"\n")


# What a set-up lacks (``veilboost site-setup --check``), and what it could have since an update (``--upgrade``).
#
# Nothing here changes a file. What an update adds to policies (profiles, consents, limits) is only offered: each widens
# what jobs may ask of a site, or narrows it, and both are the site's to decide.


_SOON = timedelta(days=30)
_NOT_OFFERED = ("site", "workspace", "data_sets", "plugins", "consents", "vertical", "data_protection")


def missing(folder: Path) -> dict[Path, list[str]]:
    """Return what each workspace of a folder lacks before jobs can run there, one clause for each.

    Raises:
        ConfigurationError: the folder stands for no workspace, or FLARE could start no job in it.
    """
    check_place(folder)
    return {path: list(_missing(path, role)) for path, role in workspaces(folder)}


def policy_of(workspace: Path, role: Role) -> SitePolicy:
    """Return the policy of a workspace that is no server's. Raises: ConfigurationError."""
    return SitePolicy.load(workspace, "site" if role is Role.SIMULATOR else site_name(workspace))


def _missing(workspace: Path, role: Role) -> Iterator[str]:
    yield from flare_boundary.gaps(workspace)
    yield from leftover_gaps(workspace, role)
    yield from _certificate_gaps(workspace, role)
    if role is Role.SERVER:
        return
    try:
        policy = policy_of(workspace, role)
        if role is Role.SITE:
            yield from run_gaps(workspace, policy)
    except ConfigurationError as error:
        yield str(error)
        return
    if not policy.data_sets:
        yield "the policy names no data set (--data-set NAME=PATH)"
    yield from budget_gaps(policy)
    for name, data_set in policy.data_sets.items():
        place = here(workspace, data_set.path) if role is Role.SITE else None  # a simulator has its sites in {site}
        if place is not None and not any(one.exists() for one in known_files(place)):
            yield f"data set {name!r}: there is no file {place}"


def certificate_end(workspace: Path, role: Role) -> datetime | None:
    """Return when the certificate of a kit ends; None where there is none. Raises: ConfigurationError: it is none."""
    path = workspace / "startup" / ("server.crt" if role is Role.SERVER else "client.crt")
    if role is Role.SIMULATOR or not path.is_file():
        return None
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except ValueError:
        raise ConfigurationError(f"{path} is no certificate") from None


def _certificate_gaps(workspace: Path, role: Role) -> Iterator[str]:
    """Yield what is wrong with the certificate of a kit, or will be within a month."""
    try:
        end = certificate_end(workspace, role)
    except ConfigurationError as error:
        yield str(error)
        return
    if end is not None and end - datetime.now(UTC) < _SOON:
        yield f"the certificate of {workspace} ends on {end:%Y-%m-%d}: have the project's administrator renew it"


def offers(workspace: Path) -> list[str]:
    """Return what a site's policy could say and does not, one line for each; nothing for a workspace without policy."""
    path = workspace / POLICY_FILE
    if not path.is_file():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))  # SitePolicy.load has read it before
    lines = [
        f"{key} = {json.dumps(value)} unless said: {_first_sentence(description_of(cls, key.rpartition('.')[2]))}"
        for key, value, cls in _left_out(document)
    ]
    allowed = document.get("allowed_profiles", DEFAULT_PROFILES)
    lines += [f"profile {name} is not allowed: --add-profile {name}" for name in PROFILES if name not in allowed]
    return lines


def _left_out(document: dict[str, object]) -> Iterator[tuple[str, object, type]]:
    for prefix, cls, default in (
        ("", SitePolicy, SitePolicy("site", Path())),
        ("consents.", Consents, Consents()),
        ("vertical.", VerticalRules, VerticalRules()),
    ):
        part = document.get(prefix[:-1], {}) if prefix else document
        for each in dataclasses.fields(default):
            value = getattr(default, each.name)
            is_plain = isinstance(value, (bool, int, float, str)) and (prefix or each.name not in _NOT_OFFERED)
            if is_plain and isinstance(part, dict) and each.name not in part:
                yield f"{prefix}{each.name}", value, cls


def _first_sentence(text: str) -> str:
    text = " ".join(text.split())
    return text.partition(". ")[0].removesuffix(".") + "."
