"""The policy of a site: what it allows, with which data, and how it is read."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import pwd
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from annotated_types import Ge, Le
from pydantic import AfterValidator, Field

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.checks import check_path_letters, check_plain, expect
from nvflare_plugins.base.declared import (
    STRICT,
    Document,
    FilePath,
    Flag,
    Name,
    OneOf,
    Words,
    document,
    refuse_unknown,
    values_of,
)
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.base.files import locked
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.data.declaration import (
    MOST_ROWS,
    Cluster,
    Count,
    CountOrNone,
    DataProtection,
    DataSet,
    SnapshotSource,
    VerticalRules,
    format_of,
    is_pattern,
    known_files,
)
from nvflare_plugins.site.policy_values import (
    ARITHMETIC,
    FOLDERS,
    MIN_EFFECTIVE_ROWS,
    POLICY_FILE,
    SERVER_POLICY_FILE,
    Consents,
    Floors,
    JobTerms,
    PluginPin,
    ReleaseRules,
    Retention,
    is_private,
)
from nvflare_plugins.site.profiles import DEFAULT_PROFILES, PROFILES, REMOVED_PROFILES
from nvflare_plugins.site.protocols import MOST as MOST_PROTOCOL
from nvflare_plugins.site.protocols import PROTOCOLS
from nvflare_plugins.wire.profiles import plugin_of

# Reads ``veilboost.json``: what it leaves to be worked out, before its values are checked.


_log = logging.getLogger(__name__)
KIT = "startup/fed_client.json"
_Whole: TypeAlias = Callable[[str, object], object]
"""Makes the path that stands under a key whole."""


def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object. Raises: ConfigurationError, if a key stands there twice."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"key {name!r} stands there twice.")
    return dict(pairs)


def _read_json(path: Path, name: str) -> object:
    """Return what a policy's file holds. Raises: FileNotFoundError, ConfigurationError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates)
    except FileNotFoundError:
        raise
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:  # also numbers of too many digits
        raise ConfigurationError(f"{name} cannot be read as JSON ({type(error).__name__}).") from None


def file_values(document: object, known: Sequence[str], workspace: Path, site: str) -> dict[str, Any]:
    """Return the values of a policy as its file states them, with whole paths and formats of files.

    Args:
        known: the keys that a file may have.
        workspace: start of relative paths.
        site: takes the place of ``{site}`` in paths.

    Raises:
        ConfigurationError: an unknown key.
    """
    if not isinstance(document, dict):
        raise ConfigurationError("the policy must be an object")
    check_plain("the policy", document)
    refuse_unknown("the policy", document, known)
    whole = _whole_paths(workspace, site)
    values = {**FOLDERS, **document}
    profiles = values.get("allowed_profiles")
    if isinstance(profiles, list):
        values["allowed_profiles"] = _without_removed(profiles, site)
    for key in (*FOLDERS, "ledger_heads"):
        if key in values:
            values[key] = whole(key, values[key])
    if isinstance(values["ledgers"], Path):
        values.setdefault("ledger_heads", values["ledgers"] / "heads")
    values["cluster"] = _cluster("cluster", values.get("cluster"), whole)
    _complete(values, "snapshots", SnapshotSource, ("folder", "password_file"), whole)
    _complete(values, "data_sets", DataSet, ("path",), whole)
    snapshots, sets = values.get("snapshots"), values.get("data_sets")
    folders = (
        [one.get("folder") for one in snapshots.values() if isinstance(one, dict)]
        if isinstance(snapshots, dict)
        else []
    )
    for name, entry in sets.items() if isinstance(sets, dict) else ():
        if isinstance(entry, dict):
            _complete_data_set(name, entry, folders, whole)
    return values


def _whole_paths(workspace: Path, site: str) -> _Whole:
    def whole(key: str, value: object) -> object:
        if not isinstance(value, str) or not value:
            return value
        check_path_letters(key, value)
        return workspace / value.replace("{site}", site)

    return whole


def _without_removed(profiles: list[object], site: str) -> list[object]:
    for name in (one for one in profiles if isinstance(one, str) and one in REMOVED_PROFILES):
        _log.warning(
            "%s: profile %s was removed, and to allow it does nothing. Policy key: allowed_profiles. Remedy: allow "
            "%s in its place, which is faster",
            site,
            name,
            REMOVED_PROFILES[name],
        )
    return [one for one in profiles if one not in list(REMOVED_PROFILES)]


def _complete_data_set(name: str, entry: dict[str, Any], folders: Sequence[object], whole: _Whole) -> None:
    path = entry.get("path")
    if path is None:
        raise ConfigurationError(f"data_sets.{name} lacks path")
    if "cluster" in entry:
        entry["cluster"] = _cluster(f"data_sets.{name}.cluster", entry["cluster"], whole)
    if "format" not in entry and isinstance(path, Path):
        is_folder = path in folders or os.path.isdir(path) or is_pattern(path)  # Path.is_dir raises
        entry["format"] = "parquet" if is_folder else format_of(path) or ("csv" if entry.get("loader") else None)


def _complete(values: dict[str, Any], key: str, cls: type[Document], paths: Sequence[str], whole: _Whole) -> None:
    """Give the entries of an object their names, and whole paths. Raises: ConfigurationError: an unknown key."""
    entries = values.get(key)
    if not isinstance(entries, dict):
        return
    known = [name for name in cls.__dataclass_fields__ if name != "name"]
    values[key] = complete = {}
    for name, entry in entries.items():
        if isinstance(entry, dict):
            refuse_unknown(f"{key}.{name}", entry, known)
            found = {path: whole(f"{key}.{name}.{path}", entry[path]) for path in paths if path in entry}
            complete[name] = {**entry, "name": name, **found}
        else:
            complete[name] = entry


def _cluster(name: str, entry: object, whole: _Whole) -> object:
    security = entry.get("security") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(security, dict):
        return entry
    return {**entry, "security": {key: whole(f"{name}.security.{key}", value) for key, value in security.items()}}


def refuse_shared_files(data_sets: Iterable[DataSet]) -> None:
    """Refuse two data sets on one file: each has budgets, caps and counts of its own, and the rows would have both.

    Raises:
        ConfigurationError: two paths lead to one file, after ``{site}``, links and ``..`` are resolved; or two names
            are hard links to one.
    """
    owners: dict[object, str] = {}
    for data_set in data_sets:
        real = os.path.realpath(data_set.path)
        marks: list[object] = []
        for file in (real, *map(os.path.realpath, known_files(data_set.path))):
            marks.append(file)
            with contextlib.suppress(OSError):
                status = os.stat(file)
                marks.append((status.st_dev, status.st_ino))
        for mark in marks:
            other = owners.setdefault(mark, data_set.name)
            if other != data_set.name:
                raise ConfigurationError(
                    f"data_sets.{other} and data_sets.{data_set.name} are one file: its rows would have two "
                    "budgets and two memories of what was released. Keep one of the names and use it in all jobs; "
                    "other rows need a file of their own."
                )


# What one site allows: its own file, ``<workspace>/local/veilboost.json``, which no job can change.
#
# A job is checked against it before anything is sent. A refusal names the policy key, so that the site's administrator
# knows what to change, and the remedy on the job's side.


_NOT_IN_FILE = ("site", "workspace")
_ALLOWS_NOTHING = (
    *_NOT_IN_FILE,
    *FOLDERS,
    "ledger_heads",
    "data_sets",
    "snapshots",
    "data_protection",
    "cluster",
    "retention",
)
_SITE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,127}")


def policy_of_simulated(workspace: Path, site: str) -> Path:
    """Return the policy of one site of a simulator, whose sites otherwise share one. A startup kit never reads it."""
    return workspace / "local" / f"veilboost-{site}.json"


def policy_path(workspace: Path, site: str) -> Path:
    """Return the file that a site's policy is read from."""
    path = policy_of_simulated(workspace, site)
    return workspace / POLICY_FILE if (workspace / KIT).exists() or not path.is_file() else path


def own_workspace(folder: Path, site: str) -> Path:
    """Return a site's workspace. Workspaces of a simulator or POC keep each site's in a folder of the site's name."""
    inner = folder / site
    return inner if (inner / POLICY_FILE).is_file() else folder


def workspace_of(run_folder: Path) -> Path | None:
    """Return the site's workspace that a run's folder lies in, as it does unless its policy keeps runs elsewhere."""
    found = run_folder.resolve().parent.parent
    return found if (found / POLICY_FILE).is_file() else None


Profiles = Annotated[
    tuple[Annotated[str, OneOf(*PROFILES)], ...], AfterValidator(lambda names: tuple(dict.fromkeys(names)))
]
Protocol = Annotated[int, STRICT, Ge(1), Le(MOST_PROTOCOL)]
PluginName = Annotated[str, STRICT, Field(pattern="^[A-Za-z0-9_]{1,64}$")]
Fingerprint = Annotated[
    str,
    STRICT,
    Field(pattern="^([0-9A-Fa-f]{2}:?){32}$"),
    AfterValidator(lambda text: text.replace(":", "").lower()),
    Words("a SHA-256 fingerprint of 64 hex digits"),
]


@document
class SitePolicy(Document):
    """The policy of one site. In ``veilboost.json`` every key may be left out; the default is the safe choice."""

    WHAT = "the policy"
    IS_JSON = False  # it holds paths; the file is checked before

    site: Name
    """This site's name: from FLARE, not from the file."""
    workspace: FilePath
    """The site's workspace, where relative paths of the file start: not from the file either."""
    data_sets: dict[Name, DataSet] = field(default_factory=dict)
    """Data sets by the names that jobs use. A job never sees a path."""
    snapshots: dict[Name, SnapshotSource] = field(default_factory=dict)
    """Where rows come from that lie in a database. Jobs read the files that `veilboost snapshot` writes."""
    allowed_profiles: Profiles = DEFAULT_PROFILES
    """Profiles that a job may use. `ckks`: the server together with any one site opens every site's messages.
    `dp_trusted`: the server sees exact sums. `dp_local`: each row's report is noised by itself (trees), or each value
    (buckets). `elgamal`: the active party of a vertical job sees each sum as two digits. `plain` needs the consent as
    well.
    """
    plugins: dict[PluginName, PluginPin] = field(default_factory=dict)
    """Processors of horizontal sums, mechanisms of noise, and schemes of vertical jobs, that others have written:
    `"acme_masks": {"distribution": "acme-veil", "version": "1.2.0"}`. A job asks for one as profile (or noise)
    `plugin.acme_masks`, for a scheme as profile `scheme.NAME`.
    Only what stands here is ever imported, and only in this version, which all sites of a job must have. It runs with
    everything that the site's process may do.
    See nvflare_plugins/conformance/README.md.
    """
    min_sites: Count = 3
    """Fewest data-bearing sites."""
    max_colluders: CountOrNone = 1
    """How many other sites might pool what they see. A job must have at least two more sites than that, so that a
    sum still mixes this site with an honest one.
    """
    min_key_bits: Annotated[int, STRICT, Ge(2048), Le(MOST_ROWS)] = 3072
    """Shortest Paillier key: 3072 bits (128-bit strength), 2048 (112-bit)."""
    min_rows_per_cut: Count = 10
    """Fewest pooled rows that a cut may single out (k)."""
    min_effective_rows: Count = MIN_EFFECTIVE_ROWS
    """Fewest pooled effective rows that train a tree of a horizontal job, that a sampled round leaves out, and that
    an evaluation set has. In bagging: fewest rows of this site.
    """
    min_rows_per_node: CountOrNone = 4
    """Fewest pooled rows in a node of a horizontal job's trees; in bagging, fewest rows of this site in a node of
    its own trees. It may raise `min_child_weight`. It bounds nodes, not the bins of a node, which may
    hold a single row. 0 is no floor.
    """
    max_bins: Annotated[int, STRICT, Ge(2), Le(MOST_ROWS)] = 1024
    """Most bins of a feature in a horizontal job (`max_bin`)."""
    max_depth: Count = 16
    """Most levels of a tree in a horizontal job; trees without such a limit may have 2^`max_depth` leaves."""
    max_rounds: Count = 5000
    """Most rounds of a horizontal job, times `num_parallel_tree`."""
    unsigned_sessions: Flag = False
    """Accept peers without certificates where this site has none either. The simulator has none, and `site-setup` on a
    simulator's workspace writes `true`.
    """
    unsigned_peers: Flag = False
    """Accept peers without certificates although this site has one. A server can stand in for such a peer."""
    pinned_fingerprints: dict[Name, Fingerprint] = field(default_factory=dict)
    """SHA-256 fingerprint of a site's certificate; other certificates of that site are refused."""
    consents: Consents = Consents()
    """What the site agrees to although it discloses more than the defaults do."""
    inputs: FilePath = Path("inputs")
    """Folder with models that a job may continue from, by file name."""
    registry: FilePath = Path("veilboost_registry")
    """Folder of the registry against differencing. Keep it: deleting it forgets what was released."""
    tracking: Flag = True
    """Metrics per round, which are pooled over all sites, may be streamed to the server."""
    arithmetic: Annotated[str, OneOf(*ARITHMETIC)] = "auto"
    """Backend of big numbers and of ElGamal's points at this site; `auto` is the fastest there is, but never `cuda` for
    points. One that is not there ends the job.
    """
    ledgers: FilePath = Path("veilboost_ledgers")
    """Folder of the privacy ledgers. Keep it: deleting it forgets what was spent."""
    runs: FilePath = Path("veilboost_runs")
    """Folder with the site's results: models, reports, evidence. Runs, registry and ledgers may lie outside FLARE's
    workspace: `site-setup --keep-in DIR`.
    """
    ledger_heads: FilePath = Path("veilboost_ledgers/heads")
    """Folder of the files that say how far each ledger was written, so that one that lacks its last records is
    refused. Left out: `heads` in `ledgers`; a new policy says `veilboost_registry/{site}/ledger_heads`. Best a folder
    that no backup restores together with `ledgers`.
    """
    vertical: VerticalRules = VerticalRules()
    """The site's own limits as a party of vertical jobs."""
    share_data_errors: Flag = False
    """Tell the server and the other sites why a check of this site's rows failed (which column, which kind of
    value; no value, count or row). Otherwise they read one text that is the same for all reasons, because a job that
    asks for the wrong thing on purpose would learn whether some row is there. Reasons of private jobs are never shared.
    """
    data_refusals_per_month: Count = 20
    """Jobs that may fail because of the rows of a data set within 31 days; each tells one bit. Then jobs on it are
    refused before its rows are looked at, until time has passed or `veilboost registry DIR --site NAME --reset-refusals
    DATA_SET` starts the count anew. Jobs that fail because another site, or the job's `subsample`, asks for more pooled
    rows than `min_effective_rows` are counted apart, and a full count stops such jobs alone.
    """

    cluster: Cluster | None = None
    """A Dask cluster of the site on which its part of trainings runs; needs the extra `cluster`. `null` trains in the
    site's own process. Results are the same, and no other party sees a difference. See jobs/CLUSTER.md.
    """
    release_rules: ReleaseRules | None = None
    """Rules that `veilboost release` must have found a model to keep before `veilboost export` copies it and `veilboost
    models` puts it in use at this site. `null` asks for no decision. It binds this site's copy: the other sites of a
    job hold the same model. See jobs/DOSSIER.md.
    """
    least_protocol: dict[Name, Protocol] = field(default_factory=dict)
    """Lowest protocol that this site takes part by, for each kind of job, such as `{"horizontal": 1}`; a kind that is
    left out takes the highest of the installed release alone. Name the lower one while sites of a job are updated one
    after the other. See jobs/RUNNING.md#update.
    """
    retention: Retention | None = None
    """When `veilboost runs --prune` lets runs go; `null` keeps all."""
    data_protection: DataProtection = DataProtection()
    """What the page for a data-protection officer (`veilboost report --summary`) says in the site's own words.
    """

    def __post_init__(self) -> None:
        refuse_unknown("least_protocol", self.least_protocol, list(PROTOCOLS))
        refuse_shared_files(self.data_sets.values())

    @classmethod
    def load(cls, workspace: Path, site: str) -> SitePolicy:
        """Read ``<workspace>/local/veilboost.json``; a simulated site reads ``policy_of_simulated`` if that is there.

        Raises:
            ConfigurationError: the file is missing, not JSON, or does not hold what it should.
        """
        try:
            document = _read_json(policy_path(workspace, site), f"{site}: {POLICY_FILE}")
        except FileNotFoundError:
            raise ConfigurationError(
                f"{site} has no site policy ({POLICY_FILE} in its workspace): run `veilboost site-setup` on the "
                "workspace and fill it in."
            ) from None
        return cls.from_dict(document, workspace=workspace, site=site)

    @classmethod
    def from_dict(cls, document: object, *, workspace: Path, site: str) -> SitePolicy:
        """Build a policy from the content of ``veilboost.json``.

        Args:
            document: the parsed JSON.
            workspace: start of relative paths.
            site: this site's name.

        Raises:
            ConfigurationError: an unknown key, or a wrong value; the message names the key.
        """
        if not _SITE_NAME.fullmatch(site):
            raise ConfigurationError("a site name has letters, digits and _ . @ - only.")
        start = Path(workspace).absolute()
        try:
            known = [name for name in cls.__dataclass_fields__ if name not in _NOT_IN_FILE]
            return cls(site=site, workspace=start, **file_values(document, known, start, site))
        except ConfigurationError as error:
            raise ConfigurationError(f"{POLICY_FILE}: {error}") from None

    def allowed(self) -> bytes:
        """Return what the policy allows as JSON; evidence holds its hash.

        Paths are left out, which are nobody's business, and the site's own words, which allow nothing.
        """
        return json.dumps(values_of(self, _ALLOWS_NOTHING), sort_keys=True, default=values_of).encode()

    def fingerprint(self) -> str:
        """Return the SHA-256 of what the policy allows, for the evidence."""
        return hashlib.sha256(self.allowed()).hexdigest()

    def data_set(self, name: str) -> DataSet:
        """Return a data set by the name that jobs use.

        Raises:
            PolicyRefusal: this site has no data set of that name.
        """
        if name not in self.data_sets:
            raise self._refusal("data_sets", f"has no data set named {name!r}", "ask the site to add it")
        return self.data_sets[name]

    def cluster_for(self, name: str) -> Cluster | None:
        """Return where trainings on a data set run: its own cluster, else the site's; None is this process."""
        own = self.data_sets[name].cluster if name in self.data_sets else None
        found = self.cluster if own is None else own
        return found if found is None or not found.sites or self.site in found.sites else None

    def statement(self, names: Iterable[str]) -> dict[str, str]:
        """Return what the site says of the processing of data sets, by the keys of ``DataProtection``.

        Each data set's own words go before those of the policy; where several differ, all are said.
        """
        own = [self.data_sets[name].data_protection for name in names if name in self.data_sets]
        found = {}
        for key in DataProtection.__dataclass_fields__:
            said = [getattr(one, key) or getattr(self.data_protection, key) for one in own or [self.data_protection]]
            found[key] = "; ".join(dict.fromkeys(filter(None, said)))
        return found

    def data_set_for(self, name: str, profile: str, *, is_paid: bool = False) -> DataSet:
        """Return a data set for a job that uses its values, in whatever role. Call it before anything is loaded.

        Args:
            is_paid: the job pays for what it releases from the data set's budget, whatever its profile.

        Raises:
            PolicyRefusal: this site has no data set of that name, or it has a privacy budget, which a job under that
                profile would not keep.
        """
        data_set = self.data_set(name)
        if data_set.privacy is not None and not is_private(profile) and not is_paid:
            self.check_exact_use(name, f"profile {profile!r} has none")
        return data_set

    def check_exact_use(self, name: str, why: str) -> None:
        """Check the consent to use a data set with a privacy budget without differential privacy.

        Args:
            why: why this use is such a one, for the refusal.

        Raises:
            PolicyRefusal: it is not given.
        """
        self.check_consent(
            "exact_use_of_budgeted_data",
            f"gives data set {name!r} a privacy budget, so that it takes differentially private jobs only, and {why}",
            "choose a profile dp_..., or a data set of other rows without a budget",
        )

    def input_file(self, name: str) -> Path:
        """Return the path of an input (a model to continue from) that a job names.

        Raises:
            PolicyRefusal: the name is not a plain file name, or there is no such file in the inputs folder.
        """
        path = self.inputs / name
        plain = name not in ("", ".", "..") and Path(name).name == name and "\\" not in name and "\0" not in name
        if not plain or not path.is_file() or path.is_symlink():
            raise self._refusal("inputs", "has no input file of the name the job gives", "ask the site to place it")
        return path

    def check_job(self, job: JobTerms, sites: Sequence[str]) -> DataSet:
        """Check a job before anything is sent, and return the data set that it names.

        Raises:
            PolicyRefusal: the policy forbids what the job asks for; the message names the key and the remedy.
        """
        self._check_protection(job)
        if job.exact_cuts:
            self.check_consent("exact_cuts", "does not accept exact cuts", "use the default quantile cuts")
        elif job.min_rows_per_cut < self.min_rows_per_cut:
            raise self._refusal(
                "min_rows_per_cut", f"asks for at least {self.min_rows_per_cut} rows per cut", "raise the job's number"
            )
        self.check_sites(sites)
        return self.data_set_for(job.data_set, job.profile)

    def check_vertical(self, job: JobTerms, sites: Sequence[str], fewest: int = 2) -> DataSet:
        """Check a vertical job, whose parties hold other columns of the same rows: nothing is summed over sites.

        Args:
            fewest: parties that the job must have.

        Raises:
            PolicyRefusal: the policy forbids what the job asks for; the message names the key and the remedy.
        """
        self._check_protection(job, "paillier")
        if job.is_paid:
            self.check_consent(
                "split_bits",
                "does not let bits of its own splits leave beside a privacy budget, which pays for noised sums alone",
                "choose preset='guarded' with a data set without a budget",
            )
        if self.site not in sites or len(set(sites)) != len(sites) or len(sites) < fewest:
            raise ConfigurationError(f"a vertical job needs {self.site} and at least one other party, each once.")
        return self.data_set_for(job.data_set, job.profile, is_paid=job.is_paid)

    def check_consent(self, name: str, what: str, remedy: str) -> None:
        """Check a consent by its name.

        Args:
            what: what this site does not do, for the refusal: "does not ...".

        Raises:
            PolicyRefusal: it is not given.
        """
        if not self.consents.gives(name):
            raise self._refusal(f"consents.{name}", what, remedy)

    def check_no_budget(self, data_set: str, what: str, remedy: str) -> None:
        """Refuse to take rows of a data set whose budget nobody would charge.

        Args:
            what: what is not charged to it, such as "the counts of a profile are".

        Raises:
            PolicyRefusal: the data set is unknown, or has a budget.
        """
        if self.data_set(data_set).privacy is not None:
            raise PolicyRefusal(
                f"data set {data_set!r} of {self.site} has a privacy budget, and {what} not charged to it. Policy key: "
                f"data_sets.{data_set}.privacy. Remedy: {remedy}"
            )

    def _check_protection(self, job: JobTerms, protected: str = "masks") -> None:
        """Check the profile and what it asks for. Args: protected: a profile to use in place of plain."""
        plugin = plugin_of(job.profile)
        if plugin is not None:
            self.plugin(plugin)
        elif job.profile not in self.allowed_profiles:
            allowed = ", ".join(self.allowed_profiles) or "none"
            what = f"does not allow profile {job.profile!r} (allowed: {allowed})"
            raise self._refusal("allowed_profiles", what, "choose another profile")
        if job.profile == "plain":
            self.check_consent("plain_profile", "does not let private messages leave in clear", f"use {protected}")
        if job.key_bits is not None and job.key_bits < self.min_key_bits:
            raise self._refusal(
                "min_key_bits", f"asks for keys of at least {self.min_key_bits} bits", "ask for longer keys"
            )
        if job.tracking and not self.tracking:
            raise self._refusal("tracking", "does not stream metrics to the server", "switch tracking off in the job")

    def plugin(self, name: str) -> PluginPin:
        """Return the release of a plugin that this site allows.

        Raises:
            PolicyRefusal: it allows none.
        """
        if name not in self.plugins:
            known = ", ".join(sorted(self.plugins)) or "none"
            raise self._refusal(f"plugins.{name}", f"names no plugin {name} (named: {known})", "choose another profile")
        return self.plugins[name]

    def check_sites(self, data_bearing: Sequence[str]) -> None:
        """Check the sites that really hold rows; call it again when that is known from the handshake.

        Raises:
            PolicyRefusal: too few sites, or too few beyond the tolerated colluders.
        """
        names = set(data_bearing)
        if self.site not in names or len(names) != len(data_bearing):
            raise ConfigurationError(f"the job's site list must hold {self.site} and every other site once.")
        if len(names) < 3:
            self.check_consent(
                "fewer_than_three_sites",
                f"does not accept {len(names)} data-bearing site(s): the others could subtract their own part",
                "train with three sites or more",
            )
        if len(names) < self.min_sites:
            raise self._refusal("min_sites", f"asks for {self.min_sites} sites, the job has {len(names)}", "add sites")
        # A single site has nobody to mix with and sends nothing that another site could subtract from.
        if 1 < len(names) < self.max_colluders + 2:
            raise self._refusal(
                "max_colluders",
                f"expects up to {self.max_colluders} colluding site(s), so {self.max_colluders + 2} sites are needed "
                f"and the job has {len(names)}",
                "add sites",
            )

    def floors(self, n_sites: int) -> Floors:
        """Return what this site asks of a horizontal job of so many sites, for the agreement with the others."""
        least = max(self.min_sites, 1 if self.consents.fewer_than_three_sites else 3)
        # A single site has nobody to mix with, see ``check_sites``.
        sites = max(least, self.max_colluders + 2) if n_sites > 1 else least
        return Floors(self.min_effective_rows, self.min_rows_per_node, sites)

    def check_size(self, bins: int, depth: int, leaves: int, rounds: int) -> None:
        """Check how much a horizontal job asks for.

        Args:
            bins: most bins of a feature.
            depth: most levels of a tree; 0 for no limit.
            leaves: most leaves of a tree, where its depth has no limit.
            rounds: boosting rounds, times the parallel trees of each.

        Raises:
            PolicyRefusal: it is more than this site allows.
        """
        too_deep = depth > self.max_depth or (depth == 0 and leaves > 2**self.max_depth)
        for key, is_over, what, name in (
            ("max_bins", bins > self.max_bins, f"{self.max_bins} bins of a feature", "max_bin"),
            ("max_depth", too_deep, f"{self.max_depth} levels of a tree", "max_depth, or max_leaves"),
            ("max_rounds", rounds > self.max_rounds, f"{self.max_rounds} rounds times parallel trees", "num_rounds"),
        ):
            if is_over:
                raise self._refusal(key, f"allows at most {what}", f"lower {name} of the job")

    def _refusal(self, key: str, what: str, remedy: str) -> PolicyRefusal:
        return PolicyRefusal(
            f"the policy of {self.site} {what}. Policy key: {key}. Remedy: {remedy}, or ask {self.site} to change it."
        )


def template(data_sets: Mapping[str, str] | None = None) -> str:
    """Return the text of a new ``veilboost.json`` with every key at its safe default.

    Args:
        data_sets: data-set name -> path, to be written into it.
    """
    policy = SitePolicy("site", Path())
    document = {name: value for name, value in dataclasses.asdict(policy).items() if name not in _NOT_IN_FILE}
    document |= {"data_sets": {name: {"path": path} for name, path in (data_sets or {}).items()}, **FOLDERS}
    document["ledger_heads"] = "veilboost_registry/{site}/ledger_heads"
    return json.dumps(document, indent=2) + "\n"


# What others have written and this site's policy names: found by package entry points, loaded by nobody else's wish.
#
# A job names a plugin, but what is imported follows from the policy of this machine alone: first the distribution that
# the policy names is looked up among the installed ones, by its metadata, which runs none of its code; then its version
# and, where the policy has one, the hash of its files are compared; only then its one entry point of that name is
# loaded. A server loads a plugin that adds messages of a form of its own, or draws noise; its pin has a hash.
#
# Security: a plugin runs in the process with everything that it has. Who may write to its Python packages may write
# anything there; the hash covers the plugin's files, and not those of what it needs.


PROCESSORS = "veilboost.processors"
"""Entry points of this group are processors of horizontal sums (pooled/processors.py)."""


def load_plugin(policy: SitePolicy, name: str, group: str = PROCESSORS) -> object:
    """Load the entry point of a plugin that the site's policy names.

    Raises:
        PolicyRefusal: the policy does not name it, or another version or other files of it are installed; nothing was
            loaded.
        ConfigurationError: its distribution is not installed, has no such entry point, or cannot be imported.
    """
    return _load_pinned(policy.plugin(name), policy.site, name, group)


@document
class ServerPolicy(Document):
    """What a server's operator allows: ``local/veilboost_server.json`` in the server's kit. Most servers need none."""

    WHAT = "the server's policy"

    plugins: dict[PluginName, PluginPin] = field(default_factory=dict)
    """Plugins that the server may load to add their messages, by the name in `profile: plugin.NAME`, or to draw noise
    (`noise: plugin.NAME`), and schemes under which parties may encrypt (`profile: scheme.NAME`). Each has the `sha256`
    of its files (`python -m nvflare_plugins.conformance.pin DISTRIBUTION`).
    """
    restarts: Annotated[int, STRICT, Ge(0), Le(50), Words("a whole number, from 0 to 50")] = 10
    """How often a job that waits for lost sites is started again after its process here has died; 0: never."""

    def __post_init__(self) -> None:
        for name, pin in self.plugins.items():
            expect(f"plugins.{name} needs sha256: a server loads files that its operator has seen", pin.sha256 != "")


NOISES = "veilboost.noises"
"""Entry points of this group are noise mechanisms of trusted servers (dp_components/integer_noise.py)."""
SCHEMES = "veilboost.vertical_schemes"
"""Entry points of this group are additive schemes of vertical jobs (he_processors/additive_schemes.py)."""


def load_hashed(policy: SitePolicy, name: str, group: str, why: str) -> tuple[object, PluginPin]:
    """Load a plugin as ``load_plugin``, if the policy states the hash of its files. Args: why: it has to.

    Raises:
        PolicyRefusal, ConfigurationError: as ``load_plugin``; or the policy states no hash.
    """
    pin = policy.plugin(name)
    if not pin.sha256:
        raise PolicyRefusal(
            f"the policy of {policy.site} names {pin} for plugin {name} without the hash of its files, {why}. Policy "
            f"key: plugins.{name}. Remedy: have {policy.site} add its sha256, which `python -m "
            "nvflare_plugins.conformance.pin` prints."
        )
    return load_plugin(policy, name, group), pin


def load_adder(workspace: Path, name: str) -> object | None:
    """Return what ``load_pinned_by_server`` loads of those that add messages."""
    found = load_pinned_by_server(workspace, name, PROCESSORS)
    return None if found is None else found[0]


def load_pinned_by_server(workspace: Path, name: str, group: str) -> tuple[object, PluginPin] | None:
    """Load a plugin at the server, if its policy pins it; None where it does not.

    Raises:
        PolicyRefusal, ConfigurationError: as ``load_plugin``; or the server's policy cannot be read.
    """
    pin = server_policy(workspace).plugins.get(name)
    return None if pin is None else (_load_pinned(pin, "server", name, group), pin)


def hash_pinned_by_server(workspace: Path, name: str) -> str:
    """Return the hash of a plugin's files that the server's policy pins; the server loads nothing of it, sites compare.

    Raises:
        PolicyRefusal, ConfigurationError: it does not; or the server's policy cannot be read.
    """
    pin = server_policy(workspace).plugins.get(name)
    if pin is None:
        raise PolicyRefusal(
            f"this server pins no plugin {name}, under whose scheme the job's parties would encrypt. Remedy: have the "
            f"server's operator pin it ({SERVER_POLICY_FILE}, key plugins), or choose another profile."
        )
    return pin.sha256


def server_policy(workspace: Path) -> ServerPolicy:
    """Return what a server's operator allows. Raises: ConfigurationError, if it cannot be read."""
    path = workspace / SERVER_POLICY_FILE
    if not path.is_file():
        return ServerPolicy()
    document = _read_json(path, f"server: {SERVER_POLICY_FILE}")
    if not isinstance(document, dict):
        raise ConfigurationError(f"server: {SERVER_POLICY_FILE} holds no JSON object")
    refuse_unknown(f"server: {SERVER_POLICY_FILE}", document, ("plugins", "restarts"))
    return ServerPolicy(**document)


def hash_of(distribution: str) -> str:
    """Return the SHA-256 over names and contents of a distribution's installed files, but those that installers write.

    Raises:
        PackageNotFoundError: it is not installed.
        ConfigurationError: it is installed as editable, its files are not known or not there, or others lie among them.
    """
    whole, n_files = hashlib.sha256(), 0
    files = sorted(metadata.distribution(distribution).files or (), key=str)
    for file in files:
        name = str(file)
        if name.startswith("__editable__") or name.endswith(".pth"):
            raise ConfigurationError(f"{distribution} is installed as editable: install it as others would")
        if "__pycache__" in file.parts or (file.parent.suffix == ".dist-info" and file.name in _BY_INSTALLERS):
            continue
        try:
            content = Path(str(file.locate())).read_bytes()
        except OSError as error:
            raise ConfigurationError(f"a file of {distribution} cannot be read ({type(error).__name__})") from None
        whole.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
        n_files += 1
    if n_files == 0:
        raise ConfigurationError(f"the files of {distribution} are not known: install it from a wheel")
    _check_alone(distribution, files)
    return whole.hexdigest()


def _check_alone(distribution: str, files: Iterable[metadata.PackagePath]) -> None:
    """Refuse what Python would import in the place of a distribution's modules, or among them, and is no file of it."""
    inside = [file for file in files if ".." not in file.parts]
    listed = {Path(str(file.locate())) for file in inside}
    known = listed | {folder for path in listed for folder in path.parents}
    modules = {Path(str(file.locate())): len(file.parts) == 1 for file in inside if file.name.endswith(_SUFFIXES)}
    alone = {_module_of(path) for path, is_shared in modules.items() if is_shared}
    for folder, is_shared in {(path.parent, is_shared) for path, is_shared in modules.items()}:
        for one in set(folder.iterdir()) - known:
            name, is_module = _module_of(one), one.is_dir() or one.name.endswith(_SUFFIXES)
            if is_module and name.isidentifier() and name != "__pycache__" and (name in alone or not is_shared):
                raise ConfigurationError(
                    f"{printable(one.name, 80)} lies among the modules of {distribution} and is none of its files: "
                    "install it again, where nothing else is"
                )


def _module_of(path: Path) -> str:
    return path.name.partition(".")[0]


def _check_found(distribution: str, module: str) -> None:
    """Refuse a module that Python would find anywhere but among a distribution's files. Raises: ConfigurationError."""
    listed = {os.path.realpath(str(file.locate())) for file in metadata.distribution(distribution).files or ()}
    parts, found = module.split("."), None
    for end in range(1, len(parts) + 1):
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(".".join(parts[:end]))
        if found is None or found.origin is not None:  # a folder that several distributions share has none
            break
    if found is None or os.path.realpath(found.origin or "") not in listed:
        raise ConfigurationError(
            f"Python does not find module {printable(module, 80)} among the files of {distribution}: install it where "
            "nothing else has that name"
        )


_SUFFIXES = tuple(importlib.machinery.all_suffixes())
_BY_INSTALLERS = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")


def _load_pinned(pin: PluginPin, site: str, name: str, group: str) -> object:
    key, given = f"plugins.{name}", pin.distribution
    try:
        installed = metadata.distribution(given)
    except metadata.PackageNotFoundError:
        raise ConfigurationError(
            f"{site} has no distribution {given} for plugin {name}. Policy key: {key}. Remedy: install {pin} there."
        ) from None
    if installed.version != pin.version:
        found = printable(str(installed.version), 40)
        raise PolicyRefusal(
            f"the policy of {site} names {pin} for plugin {name}, but version {found} is installed; it was not loaded. "
            f"Policy key: {key}.version. Remedy: install {given}=={pin.version}, or have {site} review {found} and "
            "change its policy."
        )
    if pin.sha256 and hash_of(given) != pin.sha256:
        raise PolicyRefusal(
            f"the installed files of {pin} are not those that the policy of {site} names for plugin {name}; it was not "
            f"loaded. Policy key: {key}.sha256. Remedy: install it again from where it was reviewed, or have {site} "
            "review what is installed and change its policy."
        )
    entries = tuple(installed.entry_points.select(group=group, name=name))
    if len(entries) != 1:
        raise ConfigurationError(
            f"distribution {pin} at {site} has {len(entries)} entry points {name!r} in the group {group}, where one is "
            f"due; nothing was loaded. Policy key: {key}.distribution. Remedy: name the distribution that has it."
        )
    if pin.sha256:
        _check_found(given, entries[0].module)
        sys.pycache_prefix = os.devnull  # from now on: bytecode beside the files is not what was hashed
    try:
        return entries[0].load()
    except (Exception, SystemExit) as error:  # foreign code, of which anything may come; its text may hold anything too
        raise ConfigurationError(
            f"plugin {name} of {pin} cannot be imported at {site} ({type(error).__name__}). Policy key: {key}. Remedy: "
            "install it with all that it needs."
        ) from error


# The trail of a site's policy: each text that it has had, when and by whom, beside the site's runs.
#
# A job and ``veilboost site-setup`` add a line when the policy is another than on the last line. Lines are chained by
# hashes, so that one that was changed or taken out is noticed, unless it is the last. The trail stays at the site.

TRAIL_FILE = "policy_changes.jsonl"


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
    path, status = policy.runs / TRAIL_FILE, source.stat()
    with locked(path) as file:
        file.seek(0)
        content = file.read()
        whole = content.rfind(b"\n") + 1
        file.truncate(whole)  # a line that a crash cut short
        changes, last = _read(path, content[:whole])
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
        file.write(json.dumps(line, sort_keys=True).encode() + b"\n")
        file.flush()  # writes all of it, or raises
        os.fsync(file.fileno())
    return changed


def trail(runs: Path) -> list[PolicyChange]:
    """Return the trail beside a site's runs, the oldest line first. Raises: ConfigurationError, if it is damaged."""
    path = runs / TRAIL_FILE
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


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
