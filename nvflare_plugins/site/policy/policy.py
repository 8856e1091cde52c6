"""What one site allows: its own file, ``<workspace>/local/veilboost.json``, which no job can change.

A job is checked against it before anything is sent. A refusal names the policy key, so that the site's
administrator knows what to change, and the remedy on the job's side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from he_processors.errors import ConfigurationError, PolicyRefusal
from nvflare_plugins.checks import check_plain
from nvflare_plugins.data_sets.declaration import (
    MISSING_TEXTS,
    MOST_DELTA,
    MOST_EPSILON,
    DataSet,
    PrivacyBudget,
    VerticalRules,
)
from nvflare_plugins.site.policy.values import (
    DEFAULT_PROFILES,
    MIN_EFFECTIVE_ROWS,
    MOST_ROWS,
    PROFILES,
    Consents,
    Floors,
    JobTerms,
    PluginPin,
    is_private,
)
from nvflare_plugins.wire.profiles import plugin_of

POLICY_FILE = Path("local") / "veilboost.json"
ARITHMETIC = ("auto", "cuda", "ifma", "avx2", "portable", "gmpy2")
KEY_BITS_FLOOR = 2048
_DISTRIBUTION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]{0,63}")
_SITE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,127}")


def own_workspace(folder: Path, site: str) -> Path:
    """Return a site's workspace. Workspaces of a simulator or POC keep each site's in a folder of the site's name."""
    inner = folder / site
    return inner if (inner / POLICY_FILE).is_file() else folder


@dataclass(frozen=True, slots=True)
class SitePolicy:
    """The policy of one site. In ``veilboost.json`` every key may be left out; the default is the safe choice.

    Attributes:
        site: this site's name (from FLARE, not from the file).
        workspace: the site's workspace; relative paths of the file start here (not from the file either).
        data_sets: name -> ``{"path": ..., "format": "csv" | "parquet", "loader": ..., "separator": ...,
            "missing": [...], "max_rows": ..., "id": ..., "aliases": {...}, "privacy": {"epsilon": ..., "delta": ...,
            "pure_epsilon": ..., "rows_per_person": ...}}``; only ``path`` is needed. ``{site}`` in a path becomes the
            site's name. Jobs name a data set and never see a path.
        allowed_profiles: profiles a job may use. Default masks, bfv, paillier and dp_distributed. ckks: the server
            together with any one site opens every site's messages. dp_trusted: the server sees exact sums. dp_local:
            each row's report is noised by itself (trees), or each value (buckets). okamoto_uchiyama: weaker against
            parties that cheat. plain needs the consent as well.
        plugins: name -> ``{"distribution": ..., "version": ...}``: processors of horizontal sums that others have
            written. A job asks for one as profile ``plugin.NAME``; only what stands here is ever imported, and only in
            this version. It runs with everything that the site's process may do. Default none.
        min_sites: fewest data-bearing sites. Default 3.
        max_colluders: how many other sites might pool what they see. The job must have at least two more sites
            than that, so that the sum still mixes this site with an honest one. Default 1.
        min_key_bits: shortest Paillier key. Default 3072 (128-bit security); 2048 is the least (112-bit).
        min_rows_per_cut: fewest pooled rows that a cut may single out (k). Default 10.
        min_effective_rows: fewest pooled effective rows that train a tree of a horizontal job. Default 100. A row
            counts as its weight's share of the largest weight, rounded up to a power of two, and as ``subsample``: a
            weight column of two ones, or of two large and many tiny weights, is two rows, and a sample of a hundredth
            of 1,000 rows is ten. ``scale_pos_weight`` is a weight of the rows with label 1. As many rows must be left
            out where rows are drawn: the difference of two rounds that lack few rows shows these few, so that 1,000
            rows allow ``subsample`` from 0.1 to 0.9. A site that has less than half a row's weight does not count as
            one. This is never more than Kish's effective sample size (sum w)^2 / (sum w^2), and unlike it
            can be added over sites in counts that are capped at what is needed, so that the sum says little more than
            the decision. As a site may claim rows that it does not have, each looks at its own too: its Kish size must
            be its share of this number, or a quarter of its rows if these are few. An evaluation set must have as many:
            each metric is a sum over it, after every round. With sampling the rows really drawn vary around that
            number.
        min_rows_per_node: fewest pooled rows in a node of a horizontal job's trees. Default 4; 0 for no floor. It is
            enforced beforehand: min_child_weight is at least this number times the largest hessian that a row can
            have, which is the objective's bound times the largest weight (rounded up to a power of two). A job that
            leaves min_child_weight out gets the larger of XGBoost's 1 and that number, the same at all sites, and the
            run's record says so; a job that gives a smaller one is refused with the number. For binary:logistic 4 rows
            are XGBoost's default already. Where hessians have no bound (count:poisson, reg:gamma, reg:tweedie,
            reg:squaredlogerror) or XGBoost does not keep to min_child_weight (multi_output_tree), the sites add up
            the rows of each leaf after every tree, and the job ends at the first leaf with fewer: that tree's sums
            have been seen by then. It bounds nodes, not the bins of a node, which may hold a single row.
        max_bins: most bins of a feature in a horizontal job (max_bin). Default 1024.
        max_depth: most levels of a tree in a horizontal job; trees without such a limit may have 2^max_depth leaves.
            Default 16.
        max_rounds: most rounds of a horizontal job, times num_parallel_tree. Default 5000.
        unsigned_sessions: accept peers without certificates (the simulator has none). Default false.
        pinned_fingerprints: site name -> SHA-256 fingerprint (hex) of its certificate; other certificates of that
            site are refused.
        consents: see ``Consents``.
        inputs: folder with models that a job may continue from, by file name. Default "inputs".
        registry: folder of the registry against differencing; may contain ``{site}``. Default
            "veilboost_registry/{site}". Keep it: deleting it forgets what was released.
        runs: folder with the site's results (models, reports, evidence); may contain ``{site}``. Default
            "veilboost_runs". Registry, ledgers and runs may lie outside FLARE's workspace: `site-setup --keep-in DIR`.
        tracking: metrics per round, which are pooled over all sites, may be streamed to the server. Default true.
        arithmetic: backend of big-number arithmetic at this site: auto (the fastest there is), cuda, ifma, avx2,
            portable or gmpy2. One that is not there ends the job.
        ledgers: folder of the privacy ledgers; may contain ``{site}``. Default "veilboost_ledgers/{site}". Keep it:
            deleting it forgets what was spent.
        ledger_heads: folder of the files that say how far each ledger was written, so that one that lacks its last
            records is refused; may contain ``{site}``. Default "heads" in ``ledgers``; a new policy says
            "veilboost_registry/{site}/ledger_heads". Best a folder that no backup restores together with ``ledgers``.
        vertical: see ``VerticalRules``.
        share_data_errors: tell the server and the other sites why a check of this site's rows failed (which column,
            which kind of value; no value, count or row). Default false: then they read one text that is the same for
            all reasons, because a job that asks for the wrong thing on purpose would learn whether some row is there.
            Reasons of differentially private jobs are never shared.
        data_refusals_per_month: jobs that may fail because of the rows of a data set within 31 days; each tells one
            bit. Then jobs on it are refused before its rows are looked at, until time has passed or `veilboost
            registry DIR --site NAME --reset-refusals DATA_SET` starts the count anew. Jobs that fail because another
            site, or the job's ``subsample``, asks for more pooled rows than ``min_effective_rows`` are counted apart,
            and a full count stops such jobs alone. Default 20.
    """

    site: str
    workspace: Path
    data_sets: Mapping[str, DataSet] = field(default_factory=dict)
    allowed_profiles: tuple[str, ...] = DEFAULT_PROFILES
    plugins: Mapping[str, PluginPin] = field(default_factory=dict)
    min_sites: int = 3
    max_colluders: int = 1
    min_key_bits: int = 3072
    min_rows_per_cut: int = 10
    min_effective_rows: int = MIN_EFFECTIVE_ROWS
    min_rows_per_node: int = 4
    max_bins: int = 1024
    max_depth: int = 16
    max_rounds: int = 5000
    unsigned_sessions: bool = False
    pinned_fingerprints: Mapping[str, str] = field(default_factory=dict)
    consents: Consents = Consents()
    inputs: Path = Path("inputs")
    registry: Path = Path("veilboost_registry")
    tracking: bool = True
    arithmetic: str = "auto"
    ledgers: Path = Path("veilboost_ledgers")
    runs: Path = Path("veilboost_runs")
    ledger_heads: Path = Path("veilboost_ledgers/heads")
    vertical: VerticalRules = VerticalRules()
    share_data_errors: bool = False
    data_refusals_per_month: int = 20

    @classmethod
    def load(cls, workspace: Path, site: str) -> SitePolicy:
        """Read ``<workspace>/local/veilboost.json``.

        Raises:
            ConfigurationError: the file is missing, not JSON, or does not hold what it should.
        """
        path = workspace / POLICY_FILE
        try:
            document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
        except FileNotFoundError:
            raise ConfigurationError(
                f"{site} has no site policy ({POLICY_FILE} in its workspace): run `veilboost site-setup` on the "
                "workspace and fill it in."
            ) from None
        except (OSError, ValueError, RecursionError) as error:  # also numbers of too many digits
            problem = type(error).__name__
            raise ConfigurationError(f"{site}: {POLICY_FILE} cannot be read as JSON ({problem}).") from None
        return cls.from_dict(document, workspace=workspace, site=site)

    @classmethod
    def from_dict(
        cls, document: object, *, workspace: Path, site: str, key_bits_floor: int = KEY_BITS_FLOOR
    ) -> SitePolicy:
        """Build a policy from the content of ``veilboost.json``.

        Args:
            document: the parsed JSON.
            workspace: start of relative paths.
            site: this site's name.
            key_bits_floor: least ``min_key_bits``; only tests may lower it.

        Raises:
            ConfigurationError: an unknown key, or a wrong value; the message names the key.
        """
        if not _SITE_NAME.fullmatch(site):
            raise ConfigurationError("a site name has letters, digits and _ . @ - only.")
        check_plain("the policy", document)
        given = _object(document, "the policy", tuple(_READERS))
        reader = _Reader(site, Path(workspace).absolute(), key_bits_floor)
        values = {key: _READERS[key](reader, key, value) for key, value in given.items()}
        values.setdefault("inputs", reader.path("inputs", "inputs"))
        values.setdefault("registry", reader.path("registry", "veilboost_registry/{site}"))
        values.setdefault("ledgers", reader.path("ledgers", "veilboost_ledgers/{site}"))
        values.setdefault("runs", reader.path("runs", "veilboost_runs"))
        values.setdefault("ledger_heads", values["ledgers"] / "heads")  # type: ignore[operator]
        return cls(site=site, workspace=reader.workspace, **values)  # type: ignore[arg-type]

    def fingerprint(self) -> str:
        """Return a hash of what the policy allows, for the evidence. Paths are left out: they are nobody's business."""
        allowed = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name
            not in (
                "site",
                "workspace",
                "data_sets",
                "inputs",
                "registry",
                "ledgers",
                "ledger_heads",
                "runs",
            )
        }
        return hashlib.sha256(json.dumps(allowed, sort_keys=True).encode()).hexdigest()

    def data_set(self, name: str) -> DataSet:
        """Return a data set by the name that jobs use.

        Raises:
            PolicyRefusal: this site has no data set of that name.
        """
        if name not in self.data_sets:
            raise self._refusal("data_sets", f"has no data set named {name!r}", "ask the site to add it")
        return self.data_sets[name]

    def data_set_for(self, name: str, profile: str) -> DataSet:
        """Return a data set for a job that uses its values, in whatever role. Call it before anything is loaded.

        Raises:
            PolicyRefusal: this site has no data set of that name, or it has a privacy budget, which a job under that
                profile would not keep.
        """
        data_set = self.data_set(name)
        if data_set.privacy is not None and not is_private(profile):
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
        if job.exact_cuts and not self.consents.exact_cuts:
            raise self._refusal("consents.exact_cuts", "does not accept exact cuts", "use the default quantile cuts")
        if not job.exact_cuts and job.min_rows_per_cut < self.min_rows_per_cut:
            raise self._refusal(
                "min_rows_per_cut", f"asks for at least {self.min_rows_per_cut} rows per cut", "raise the job's number"
            )
        self.check_sites(sites)
        return self.data_set_for(job.data_set, job.profile)

    def check_vertical(self, job: JobTerms, sites: Sequence[str]) -> DataSet:
        """Check a vertical job, whose parties hold other columns of the same rows: nothing is summed over sites.

        Raises:
            PolicyRefusal: the policy forbids what the job asks for; the message names the key and the remedy.
        """
        self._check_protection(job, "paillier")
        if self.site not in sites or len(set(sites)) != len(sites) or len(sites) < 2:
            raise ConfigurationError(f"a vertical job needs {self.site} and at least one other party, each once.")
        return self.data_set_for(job.data_set, job.profile)

    def check_consent(self, name: str, what: str, remedy: str) -> None:
        """Check a consent by its name.

        Args:
            what: what this site does not do, for the refusal: "does not ...".

        Raises:
            PolicyRefusal: it is not given.
        """
        if not getattr(self.consents, name):
            raise self._refusal(f"consents.{name}", what, remedy)

    def _check_protection(self, job: JobTerms, protected: str = "masks") -> None:
        """Check the profile and what it asks for. Args: protected: a profile to use in place of plain."""
        plugin = plugin_of(job.profile)
        if plugin is not None:
            self.plugin(plugin)
        elif job.profile not in self.allowed_profiles:
            allowed = ", ".join(self.allowed_profiles) or "none"
            what = f"does not allow profile {job.profile!r} (allowed: {allowed})"
            raise self._refusal("allowed_profiles", what, "choose another profile")
        if job.profile == "plain" and not self.consents.plain_profile:
            what = "does not let private messages leave in clear"
            raise self._refusal("consents.plain_profile", what, f"use {protected}")
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
        if len(names) < 3 and not self.consents.fewer_than_three_sites:
            raise self._refusal(
                "consents.fewer_than_three_sites",
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
    document = {
        "data_sets": {name: {"path": path} for name, path in (data_sets or {}).items()},
        "allowed_profiles": list(DEFAULT_PROFILES),
        "plugins": {},
        "min_sites": 3,
        "max_colluders": 1,
        "min_key_bits": 3072,
        "min_rows_per_cut": 10,
        "min_effective_rows": MIN_EFFECTIVE_ROWS,
        "min_rows_per_node": 4,
        "max_bins": 1024,
        "max_depth": 16,
        "max_rounds": 5000,
        "unsigned_sessions": False,
        "pinned_fingerprints": {},
        "consents": dict.fromkeys(Consents.__dataclass_fields__, False),
        "inputs": "inputs",
        "registry": "veilboost_registry/{site}",
        "tracking": True,
        "arithmetic": "auto",
        "ledgers": "veilboost_ledgers/{site}",
        "runs": "veilboost_runs",
        "ledger_heads": "veilboost_registry/{site}/ledger_heads",
        "vertical": dataclasses.asdict(VerticalRules()),
        "share_data_errors": False,
        "data_refusals_per_month": 20,
    }
    return json.dumps(document, indent=2) + "\n"


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"{POLICY_FILE}: key {name!r} stands there twice.")
    return dict(pairs)


def _object(value: object, where: str, keys: tuple[str, ...]) -> dict[str, object]:
    """Return a JSON object whose keys are all known."""
    if not isinstance(value, dict):
        raise ConfigurationError(f"{POLICY_FILE}: {where} must be an object.")
    for key in value:
        if key not in keys:
            close = difflib.get_close_matches(str(key), keys, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" Known keys: {', '.join(keys)}."
            raise ConfigurationError(f"{POLICY_FILE}: unknown key {key!r} in {where}.{hint}")
    return value


def _wrong(key: str, needed: str) -> ConfigurationError:
    return ConfigurationError(f"{POLICY_FILE}: {key} must be {needed}.")


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads values of the file; every method takes the key for its messages."""

    site: str
    workspace: Path
    key_bits_floor: int

    def flag(self, key: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise _wrong(key, "true or false")
        return value

    def text(self, key: str, value: object) -> str:
        if not isinstance(value, str) or not value:
            raise _wrong(key, "a text")
        return value

    def integer(self, key: str, value: object, low: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MOST_ROWS:
            raise _wrong(key, f"a whole number of at least {low}")
        return value

    def number(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise _wrong(key, "a positive number")
        return float(value)

    def path(self, key: str, value: object) -> Path:
        return self.workspace / self.text(key, value).replace("{site}", self.site)

    def profiles(self, key: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(name in PROFILES for name in value):
            raise _wrong(key, f"a list of {', '.join(PROFILES)}")
        return tuple(dict.fromkeys(value))

    def plugins(self, key: str, value: object) -> dict[str, PluginPin]:
        if not isinstance(value, dict) or not all(plugin_of(f"plugin.{name}") for name in value):
            raise _wrong(key, "an object from name (letters, digits and _) to distribution and version")
        return {name: self._plugin(f"{key}.{name}", item) for name, item in value.items()}

    def _plugin(self, key: str, value: object) -> PluginPin:
        given = _object(value, key, ("distribution", "version"))
        distribution = self._exact(f"{key}.distribution", given.get("distribution"), _DISTRIBUTION, "acme-veil")
        return PluginPin(distribution, self._exact(f"{key}.version", given.get("version"), _VERSION, "1.2.0"))

    def _exact(self, key: str, value: object, pattern: re.Pattern[str], example: str) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise _wrong(key, f"a text, exactly as the package says it, such as {example!r}")
        return value

    def fingerprints(self, key: str, value: object) -> dict[str, str]:
        if not isinstance(value, dict):
            raise _wrong(key, "an object from site name to fingerprint")
        pinned = {site: str(text).replace(":", "").lower() for site, text in value.items()}
        if not all(re.fullmatch("[0-9a-f]{64}", text) for text in pinned.values()):
            raise _wrong(key, "SHA-256 fingerprints of 64 hex digits")
        return pinned

    def consents(self, key: str, value: object) -> Consents:
        given = _object(value, key, tuple(Consents.__dataclass_fields__))
        return Consents(**{name: self.flag(f"{key}.{name}", item) for name, item in given.items()})

    def arithmetic(self, key: str, value: object) -> str:
        if value not in ARITHMETIC:
            raise _wrong(key, f"one of {', '.join(ARITHMETIC)}")
        return str(value)

    def vertical(self, key: str, value: object) -> VerticalRules:
        given = _object(value, key, tuple(VerticalRules.__dataclass_fields__))
        return VerticalRules(**{name: self.integer(f"{key}.{name}", item, 1) for name, item in given.items()})

    def privacy(self, key: str, value: object) -> PrivacyBudget:
        given = _object(value, key, tuple(PrivacyBudget.__dataclass_fields__))
        if "epsilon" not in given or "delta" not in given:
            raise _wrong(key, "an object with epsilon and delta")
        epsilon, delta = self.number(f"{key}.epsilon", given["epsilon"]), self.number(f"{key}.delta", given["delta"])
        if epsilon > MOST_EPSILON:
            raise _wrong(f"{key}.epsilon", f"at most {MOST_EPSILON:g}: a larger one protects nobody")
        if delta > MOST_DELTA:
            raise _wrong(f"{key}.delta", f"at most {MOST_DELTA:g}, and far below one over the number of rows")
        pure = self.number(f"{key}.pure_epsilon", given["pure_epsilon"]) if "pure_epsilon" in given else None
        if pure is not None and pure > epsilon:
            raise _wrong(f"{key}.pure_epsilon", "at most epsilon, of which it is a part")
        return PrivacyBudget(
            epsilon, delta, pure, self.integer(f"{key}.rows_per_person", given.get("rows_per_person", 1), 1)
        )

    def aliases(self, key: str, value: object) -> dict[str, str]:
        if not isinstance(value, dict):
            raise _wrong(key, "an object from column to alias")
        aliases = {column: self.text(f"{key}.{column}", alias) for column, alias in value.items()}
        if len(set(aliases.values())) != len(aliases):
            raise _wrong(key, "an object with a different alias for each column")
        return aliases

    def data_sets(self, key: str, value: object) -> dict[str, DataSet]:
        if not isinstance(value, dict) or "" in value:
            raise _wrong(key, "an object from name to data set")
        data_sets = {name: self._data_set(f"{key}.{name}", name, item) for name, item in value.items()}
        _refuse_shared_files(key, data_sets.values())
        return data_sets

    def _data_set(self, key: str, name: str, value: object) -> DataSet:
        given = _object(value, key, tuple(name for name in DataSet.__dataclass_fields__ if name != "name"))
        if "path" not in given:
            raise _wrong(key, "an object with a path")
        path = self.path(f"{key}.path", given["path"])
        loader = self.text(f"{key}.loader", given["loader"]) if "loader" in given else None
        if loader is not None and not re.fullmatch(r"\w+(\.\w+)*:\w+", loader):
            raise _wrong(f"{key}.loader", "package.module:function")
        separator = self.text(f"{key}.separator", given.get("separator", ","))
        missing = given.get("missing", list(MISSING_TEXTS))
        if not isinstance(missing, list) or not all(isinstance(text, str) for text in missing):
            raise _wrong(f"{key}.missing", "a list of texts")
        if len(separator) != 1:
            raise _wrong(f"{key}.separator", "one character")
        max_rows = self.integer(f"{key}.max_rows", given.get("max_rows", 0), 0)
        file_format = self._format(key, path, given.get("format"), loader)
        return DataSet(
            name,
            path,
            file_format,
            loader,
            separator,
            tuple(missing),
            max_rows,
            id=self.text(f"{key}.id", given["id"]) if "id" in given else None,
            aliases=self.aliases(f"{key}.aliases", given.get("aliases", {})),
            privacy=self.privacy(f"{key}.privacy", given["privacy"]) if "privacy" in given else None,
        )

    def _format(self, key: str, path: Path, given: object, loader: str | None) -> str:
        by_suffix = {".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}
        name = path.name.lower().removesuffix(".gz")
        file_format = given if given is not None else by_suffix.get(Path(name).suffix, "csv" if loader else None)
        if file_format not in ("csv", "parquet"):
            raise _wrong(f"{key}.format", "csv or parquet (it does not follow from the file's suffix)")
        return str(file_format)


_READERS: dict[str, Callable[[_Reader, str, object], object]] = {
    "data_sets": _Reader.data_sets,
    "allowed_profiles": _Reader.profiles,
    "plugins": _Reader.plugins,
    "min_sites": lambda reader, key, value: reader.integer(key, value, 1),
    "max_colluders": lambda reader, key, value: reader.integer(key, value, 0),
    "min_key_bits": lambda reader, key, value: reader.integer(key, value, reader.key_bits_floor),
    "min_rows_per_cut": lambda reader, key, value: reader.integer(key, value, 1),
    "min_effective_rows": lambda reader, key, value: reader.integer(key, value, 1),
    "min_rows_per_node": lambda reader, key, value: reader.integer(key, value, 0),
    "max_bins": lambda reader, key, value: reader.integer(key, value, 2),
    "max_depth": lambda reader, key, value: reader.integer(key, value, 1),
    "max_rounds": lambda reader, key, value: reader.integer(key, value, 1),
    "unsigned_sessions": _Reader.flag,
    "pinned_fingerprints": _Reader.fingerprints,
    "consents": _Reader.consents,
    "inputs": _Reader.path,
    "registry": _Reader.path,
    "tracking": _Reader.flag,
    "arithmetic": _Reader.arithmetic,
    "ledgers": _Reader.path,
    "runs": _Reader.path,
    "ledger_heads": _Reader.path,
    "vertical": _Reader.vertical,
    "share_data_errors": _Reader.flag,
    "data_refusals_per_month": lambda reader, key, value: reader.integer(key, value, 1),
}


def _refuse_shared_files(key: str, data_sets: Iterable[DataSet]) -> None:
    """Refuse two data sets on one file: each has budgets, caps and counts of its own, and the rows would have both.

    Raises:
        ConfigurationError: two paths lead to one file, after ``{site}``, links and ``..`` are resolved; or two names
            are hard links to one.
    """
    owners: dict[object, str] = {}
    for data_set in data_sets:
        real = os.path.realpath(data_set.path)
        marks: list[object] = [real]
        with contextlib.suppress(OSError):
            status = os.stat(real)
            marks.append((status.st_dev, status.st_ino))
        for mark in marks:
            other = owners.setdefault(mark, data_set.name)
            if other != data_set.name:
                raise ConfigurationError(
                    f"{POLICY_FILE}: {key}.{other} and {key}.{data_set.name} are one file: its rows would have two "
                    "budgets and two memories of what was released. Keep one of the names and use it in all jobs; "
                    "other rows need a file of their own."
                )
