"""``veilboost site-setup DIR``: merge what a site needs to run VeilBoost jobs into its FLARE workspace.

Two files of the site are touched, and nothing of a job:

* ``local/resources.json``: FLARE starts only components on the site's allow-list. FLARE's own list is kept and this
  package's FLARE components are added to it. At a site, the streaming of its log files to the server is switched off:
  FLARE's default sends the error log, with the traces of libraries that may quote values, and any job may ask for the
  whole log. What the server should know of a failure, jobs of this package report by themselves.
* ``local/veilboost.json``: the site's policy, which no job can change. A new one is strict; an existing one changes
  only where an option says so.

Calling it again changes nothing more. Running jobs keep what they started with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from he_processors.errors import ConfigurationError
from nvflare_plugins.files import write_atomically
from nvflare_plugins.site_policy import (
    POLICY_FILE,
    PROFILES,
    Consents,
    SitePolicy,
    template,
)

# Only FLARE components: a wider prefix would let a job start any class of this package with arguments of its choice.
ALLOWED_COMPONENTS = "nvflare_plugins.flare."
RESOURCES_FILE = Path("local") / "resources.json"
DEFAULT_RESOURCES_FILE = Path("local") / "resources.json.default"
_ALLOW_LIST = "class_allow_list"
_ALLOW_ALL = "*"
_LOG_STREAMING = "allow_log_streaming"


class Role(Enum):
    """What a folder is."""

    SITE = "site"
    SERVER = "server"
    SIMULATOR = "simulator workspace"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the options ask for; empty means "leave as it is".

    Attributes:
        data_sets: name -> absolute path, which may hold ``{site}``.
        ids: name of a data set -> the column that names its rows.
        budgets: name of a data set -> what all private jobs together may spend on it, by the policy's keys
            (``PrivacyBudget``).
    """

    data_sets: Mapping[str, str] = field(default_factory=dict)
    profiles: tuple[str, ...] = ()
    consents: tuple[str, ...] = ()
    min_sites: int | None = None
    max_colluders: int | None = None
    ids: Mapping[str, str] = field(default_factory=dict)
    budgets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def set_up(folder: Path, wishes: Wishes = Wishes()) -> list[str]:
    """Set up every workspace that a folder stands for.

    Args:
        folder: a simulator workspace (may be empty or not exist yet), a POC workspace or one project of it, or the
            startup kit of one production site or server.

    Returns: one sentence per change; empty if there was nothing to do.
    Raises:  ConfigurationError: the folder is none of these, or a file in it cannot be used.
    """
    changes: list[str] = []
    for path, role in workspaces(folder):
        changes += _merge_resources(path, role)
        if role is not Role.SERVER:
            changes += _merge_policy(path, role, wishes)
    return changes


def workspaces(folder: Path) -> list[tuple[Path, Role]]:
    """Return the workspaces that a folder stands for, with their roles.

    Raises: ConfigurationError.
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
    for name, role in (("fed_client.json", Role.SITE), ("fed_server.json", Role.SERVER)):
        if (folder / "startup" / name).is_file():
            yield folder, role
            return
    for production in _newest_productions(folder):
        for path in sorted(production.iterdir()):
            for name, role in (("fed_client.json", Role.SITE), ("fed_server.json", Role.SERVER)):
                if (path / "startup" / name).is_file():
                    yield path, role


def _newest_productions(folder: Path) -> list[Path]:
    if folder.name.startswith("prod_"):
        return [folder]
    newest: dict[Path, Path] = {}
    for path in sorted([*folder.glob("prod_*"), *folder.glob("*/prod_*")]):
        if path.is_dir():
            newest[path.parent] = path
    return sorted(newest.values())


def _merge_resources(workspace: Path, role: Role) -> list[str]:
    path = workspace / RESOURCES_FILE
    source = path if path.is_file() else workspace / DEFAULT_RESOURCES_FILE
    document = _read_object(source) if source.is_file() else {"format_version": 2}
    allowed = document.get(_ALLOW_LIST, list(DEFAULT_CLASS_ALLOW_LIST))
    if not isinstance(allowed, list):
        raise ConfigurationError(f"{source}: {_ALLOW_LIST} must be a list")
    changes = []
    if _ALLOW_ALL not in allowed and ALLOWED_COMPONENTS not in allowed:
        document[_ALLOW_LIST] = [*allowed, ALLOWED_COMPONENTS]
        changes.append(f"{path}: VeilBoost's components may run ({len(allowed)} entries of FLARE kept)")
    if role is not Role.SERVER and document.get(_LOG_STREAMING, True) is not False:
        document[_LOG_STREAMING] = False
        changes.append(f"{path}: log files stay at the site ({_LOG_STREAMING} is false)")
    if changes:
        _write_json(path, document)
    return changes


def _merge_policy(workspace: Path, role: Role, wishes: Wishes) -> list[str]:
    path = workspace / POLICY_FILE
    exists = path.is_file()
    document = _read_object(path) if exists else json.loads(template())
    changes = [] if exists else [f"{path}: new policy, strict by default"]
    if not exists and role is Role.SIMULATOR:
        document["unsigned_sessions"] = True
        document["inputs"] = str((workspace / "local" / "inputs").absolute())
        changes.append(f"{path}: sessions without certificates are accepted, as simulated sites have none")
    for key, value in _wanted(document, wishes):
        changes.append(f"{path}: {key} = {json.dumps(value)}")
    site = "site" if role is Role.SIMULATOR else workspace.name
    SitePolicy.from_dict(document, workspace=workspace, site=site)
    if changes:
        _write_json(path, document)
    return changes


def _wanted(document: dict[str, Any], wishes: Wishes) -> Iterator[tuple[str, Any]]:
    """Apply the options to a policy; yield what really changed."""
    plain = {
        "allowed_profiles": list(wishes.profiles) or None,
        "min_sites": wishes.min_sites,
        "max_colluders": wishes.max_colluders,
    }
    for key, value in plain.items():
        if value is not None and document.get(key) != value:
            document[key] = value
            yield key, value
    for name, path in wishes.data_sets.items():
        entry = document.setdefault("data_sets", {}).setdefault(name, {})
        if entry.get("path") != path:
            entry["path"] = path
            yield f"data_sets.{name}.path", path
    for name, column in wishes.ids.items():
        entry = document.setdefault("data_sets", {}).setdefault(name, {})
        if entry.get("id") != column:
            entry["id"] = column
            yield f"data_sets.{name}.id", column
    for name, given in wishes.budgets.items():
        entry = document.setdefault("data_sets", {}).setdefault(name, {})
        budget = {**entry.get("privacy", {}), **given}
        if entry.get("privacy") != budget:
            entry["privacy"] = budget
            yield f"data_sets.{name}.privacy", budget
    for name in wishes.consents:
        consents = document.setdefault("consents", {})
        if consents.get(name) is not True:
            consents[name] = True
            yield f"consents.{name}", True


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON ({type(error).__name__})") from None
    if not isinstance(document, dict):
        raise ConfigurationError(f"{path} must hold a JSON object")
    return document


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(document, indent=2).encode() + b"\n")


def _named(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise argparse.ArgumentTypeError("give NAME=VALUE")
    return name, value


def _budget(text: str) -> tuple[str, dict[str, float]]:
    name, value = _named(text)
    try:
        epsilon, delta, *further = value.split(",")
        budget = {"epsilon": float(epsilon), "delta": float(delta)}
        for part in further:
            key, _, number = part.partition("=")
            if key in budget or key not in ("pure_epsilon", "rows_per_person"):
                raise ValueError(key)
            budget[key] = int(number) if key == "rows_per_person" else float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(
            "give NAME=EPSILON,DELTA[,pure_epsilon=EPSILON][,rows_per_person=ROWS], for example credit=2,1e-6 or "
            "credit=2,1e-6,pure_epsilon=0.5,rows_per_person=3"
        ) from None
    return name, budget


def _data_set(text: str) -> tuple[str, str]:
    name, path = _named(text)
    return name, str(Path(path).expanduser().absolute())


def add_parser(subparsers: Any) -> None:
    """Add ``site-setup`` to the command line."""
    parser = subparsers.add_parser(
        "site-setup",
        help="prepare a simulator workspace, a POC workspace or a site's startup kit for VeilBoost jobs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--data-set", dest="data_sets", metavar="NAME=PATH", type=_data_set, action="append", default=[],
        help="register a data set under the name that jobs use; {site} in the path becomes the site's name",
    )  # fmt: skip
    parser.add_argument(
        "--id", dest="ids", metavar="NAME=COLUMN", type=_named, action="append", default=[],
        help="the column of a data set that names its rows, for alignment with other parties",
    )  # fmt: skip
    parser.add_argument(
        "--budget", dest="budgets", metavar="NAME=EPSILON,DELTA[,pure_epsilon=EPSILON][,rows_per_person=ROWS]",
        type=_budget, action="append", default=[],
        help="what all differentially private jobs together may spend on a data set, without which they are refused; "
        "how much of epsilon is kept for pure mechanisms (DPBoost), and the most rows of one person",
    )  # fmt: skip
    parser.add_argument(
        "--profile", dest="profiles", choices=PROFILES, action="append", default=[],
        help="allow exactly these profiles (repeat the option)",
    )  # fmt: skip
    parser.add_argument(
        "--consent", dest="consents", choices=tuple(Consents.__dataclass_fields__), action="append", default=[],
        help="agree to something that discloses more than the default",
    )  # fmt: skip
    parser.add_argument("--min-sites", type=int, help="fewest data-bearing sites of a job")
    parser.add_argument("--max-colluders", type=int, help="how many other sites might pool what they see")
    parser.set_defaults(func=_main)


def _main(args: argparse.Namespace) -> int:
    wishes = Wishes(
        dict(args.data_sets), tuple(args.profiles), tuple(args.consents), args.min_sites, args.max_colluders,
        dict(args.ids), dict(args.budgets),
    )  # fmt: skip
    changes = set_up(args.folder, wishes)
    print("\n".join(changes) if changes else "nothing to change: everything is set up already")
    return 0
