"""``veilboost site-setup``: prepare a site's FLARE workspace for VeilBoost jobs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.cli.options import OWN, Options
from nvflare_plugins.flare.start_check import start_faults
from nvflare_plugins.site.flare_boundary import Role
from nvflare_plugins.site.policy import SitePolicy, no_duplicates
from nvflare_plugins.site.policy_values import POLICY_FILE
from nvflare_plugins.site.setup import (
    SetupOptions,
    added,
    check_files,
    missing,
    offers,
    policy_of,
    set_up,
    warnings_of,
    workspaces,
)
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
    options = SetupOptions(
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
    check_files(args.folder, {name: path for name, path in named.items() if path not in folders})
    changes = set_up(args.folder, options)
    print("\n".join(changes) if changes else "nothing to change: everything is set up already")
    warnings = list(warnings_of(args.folder))
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
    found = missing(args.folder)
    for path, role in workspaces(args.folder):
        found[path] += start_faults(path, at_server=role is Role.SERVER)
        if role is not Role.SERVER:
            with contextlib.suppress(ConfigurationError):  # of the policy: said already
                found[path] += cluster_gaps(policy_of(path, role))
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
    for path, role in workspaces(folder):
        if role is not Role.SERVER and not (path / POLICY_FILE).is_file():
            raise ConfigurationError(f"{path} was never set up: leave out --upgrade to set it up for the first time")


def _offer(folder: Path) -> None:
    for path, _ in workspaces(folder):
        lines = offers(path)
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
            reader[key] = added(reader.get(key, []), value)
    return readers
