"""``veilboost site-setup`` and ``backup``: prepare a site's workspace for jobs; copy what it must not lose."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dp_components.ledger import back_up, ledger_files
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import make_folder, sync_folder, write_private
from nvflare_plugins.cli.options import OWN, Options, own_policy
from nvflare_plugins.flare.start_check import start_faults
from nvflare_plugins.scoring.versions import NAMES_FILE
from nvflare_plugins.site import setup
from nvflare_plugins.site.flare_boundary import Role
from nvflare_plugins.site.memory.store import Memory, note_backup
from nvflare_plugins.site.policy import TRAIL_FILE, SitePolicy, no_duplicates, policy_path
from nvflare_plugins.site.policy_values import POLICY_FILE
from nvflare_plugins.workers.dask_workers import cluster_gaps


def run(args: Options) -> int:
    """Do it, and say what has changed; or only look (``--check``)."""
    if args.check:
        return _check(args)
    if args.upgrade:
        _refuse_new_ones(args.folder)
    if args.example:
        return _example(args)
    policy = {} if args.policy is None else _policy_of(args.policy, args.folder)
    options = setup.SetupOptions(
        dict(args.data_sets),
        tuple(args.profiles),
        tuple(args.consents),
        args.min_sites,
        args.max_colluders,
        dict(args.ids),
        dict(args.budgets),
        tuple(args.allow),
        args.keep_in,
        readers(args),
        dict(args.statement),
        tuple(args.added_profiles),
        _snapshots(args),
        policy,
    )
    sources = [*options.snapshots.values(), *policy.get("snapshots", {}).values()]
    folders = {source.get("folder") for source in sources}  # the first snapshot makes them
    paths = {name: entry.get("path", "") for name, entry in policy.get("data_sets", {}).items()}
    paths = {name: path for name, path in paths.items() if Path(path).is_absolute()}
    named = {**paths, **options.data_sets}
    setup.check_files(args.folder, {name: path for name, path in named.items() if path not in folders})
    changes = setup.set_up(args.folder, options)
    print("\n".join(changes) if changes else "nothing to change: everything is set up already")
    warnings = list(setup.warnings_of(args.folder))
    args.tell(changes=changes, warnings=warnings)
    for warning in warnings:
        print(warning)
    if args.upgrade:
        _offer(args.folder)
    return 0


def _policy_of(path: Path, workspace: Path) -> dict[str, Any]:
    """Return what a file wants of a policy, where the policy's own reader takes it. Raises: ConfigurationError."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates)
        SitePolicy.from_dict(document, workspace=workspace, site="site")
    except ConfigurationError as error:
        raise ConfigurationError(f"--policy {path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"--policy {path} cannot be read as JSON ({type(error).__name__})") from None
    return document


def _check(args: Options) -> int:
    """Say what is missing, and change nothing; 1 if anything is."""
    _alone(args, "check")
    found = setup.missing(args.folder)
    for path, role in setup.workspaces(args.folder):
        found[path] += start_faults(path, at_server=role is Role.SERVER)
        if role is not Role.SERVER:
            with contextlib.suppress(ConfigurationError):  # of the policy: said already
                found[path] += cluster_gaps(setup.policy_of(path, role))
    args.tell(missing={str(path): lacking for path, lacking in found.items()})
    for path, lacking in found.items():
        print(f"{path}: {'complete' if not lacking else 'not complete'}")
        for clause in lacking:
            print(f"  {clause}")
    return 1 if any(found.values()) else 0


def _alone(args: Options, option: str) -> None:
    if any(value for name, value in vars(args).items() if name not in ("folder", option, "json", *OWN)):
        raise ConfigurationError(f"--{option} stands alone: give it no other option")


def _example(args: Options) -> int:
    from nvflare_plugins.recipes.examples import prepare

    _alone(args, "example")
    print("\n".join(prepare(args.folder)))
    return 0


def _refuse_new_ones(folder: Path) -> None:
    for path, role in setup.workspaces(folder):
        if role is not Role.SERVER and not (path / POLICY_FILE).is_file():
            raise ConfigurationError(f"{path} was never set up: leave out --upgrade to set it up for the first time")


def _offer(folder: Path) -> None:
    for path, _ in setup.workspaces(folder):
        lines = setup.offers(path)
        if lines:
            print(f"{path}: offered and not switched on; each is the site's to decide (jobs/REFERENCE.md)")
            print("\n".join(f"  {line}" for line in lines))


def _snapshots(args: Options) -> dict[str, dict[str, str]]:
    """Return the options of snapshots by name, with whole paths."""
    snapshots: dict[str, dict[str, str]] = {}
    for option, given in vars(args).items():
        for name, value in given if option.startswith("snapshot_") else ():
            key = option.removeprefix("snapshot_")
            whole = str(Path(value).expanduser().absolute()) if key in ("folder", "password_file") else value
            snapshots.setdefault(name, {})[key] = whole
    return snapshots


def readers(args: Options) -> dict[str, dict[str, Any]]:
    """Return the reader's options by data set; those that can be repeated are put together."""
    readers: dict[str, dict[str, Any]] = {}
    for option, given in vars(args).items():
        for name, value in given if option.startswith("reader_") else ():
            reader = readers.setdefault(name, {})
            key = option.removeprefix("reader_")
            reader[key] = setup.added(reader.get(key, []), value)
    return readers


MANIFEST = "backup.json"


def back_up_site(options: Options) -> int:
    """Write the folder, whole or not at all."""
    policy, out = own_policy(options), options.out.absolute()
    if out.exists() or out.is_symlink():
        raise ConfigurationError(f"{out} is there already: name a new folder for this backup")
    make_folder(out.parent)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as made:
        folder = Path(made) / out.name
        make_folder(folder)
        copied = _copy(policy, folder)
        hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in copied}
        manifest = {"site": policy.site, "at": datetime.now(UTC).isoformat(timespec="seconds"), "files": copied}
        write_private(folder / MANIFEST, json.dumps({**manifest, "sha256": hashes}, indent=1).encode())
        sync_folder(folder)
        folder.rename(out)
        sync_folder(out.parent)
    note_backup(policy)
    options.tell(backup=out, files=copied)
    for name, source in copied.items():
        print(f"{out / name}: copy of {source}")
    print("To restore, stop FLARE and put copies in their places. A restored ledger is refused until somebody")
    print("accepts what may have been spent since: veilboost ledger WORKSPACE --site NAME --data-set NAME --accept-cut")
    return 0


def _copy(policy: SitePolicy, folder: Path) -> dict[str, str]:
    """Copy everything that is there; return name in the backup -> where it belongs."""
    copied: dict[str, str] = {}
    if Memory.is_there(policy):
        memory = Memory.open(policy)
        memory.back_up(folder / memory.path.name)
        copied[memory.path.name] = str(memory.path)
    for ledger in ledger_files(policy.ledgers):
        back_up(ledger, folder / ledger.name)
        copied[ledger.name] = str(ledger)
    for source in (policy_path(policy.workspace, policy.site), policy.runs / NAMES_FILE, policy.runs / TRAIL_FILE):
        if source.is_file():
            shutil.copyfile(source, folder / source.name)
            (folder / source.name).chmod(0o600)
            copied[source.name] = str(source)
    return copied
