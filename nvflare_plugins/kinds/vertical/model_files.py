"""The parts of a vertical model on disk, committed to before any is written, and how much each feature contributes."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import xgboost as xgb

from he_processors.errors import ConfigurationError, ProtocolError
from he_processors.key_agreement import DOMAIN, encode_fields
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.base.files import inert_csv, write_atomically, write_durably
from nvflare_plugins.kinds.vertical.model import PrivateTable, structures, table_from_json, table_to_json
from nvflare_plugins.xgb.model_json import NO_LISTS, categories_of, model_bytes

# The parts of a vertical model on disk: the active party's model, and each passive party's private table.
#
# A model is one thing in several hands, and a part of another training must not slip in. When training ends, every
# party commits to its part: it publishes a hash of the part and of a random nonce that it keeps. The list of
# commitments gives the model its id. Every file holds the whole list and the party's own nonce, so that a party can
# check by itself that its file is the one it committed to, and parties that name the same model id hold parts that
# belong together.
#
# Reading checks format, commitment and structure; anything else in the place of a part is refused.


ACTIVE_FILE = "vertical_model.json"
PASSIVE_FILE = "private_table.json"
COMMITMENT_BYTES = 32
_FORMAT = "veilboost-vertical-part-1"
_UNREADABLE = "this is not a part of a vertical model, or not one that this release wrote"


@dataclass(frozen=True, slots=True)
class PartyColumns:
    """A passive party as the model knows it. Attributes: aliases: of its features, in the order of its columns."""

    site: str
    aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class ActivePart:
    """The active party's part.

    Attributes:
        booster: the model in XGBoost's JSON form, thresholds of other parties masked (``VerticalResult.model``).
        columns: names of the active party's own columns, in the order of training.
        parties: the passive parties in the order of their columns, which follow the active party's.
        best_round: of early stopping; None without.
    """

    booster: bytes
    columns: tuple[str, ...]
    parties: tuple[PartyColumns, ...]
    best_round: int | None = None

    @property
    def categories(self) -> dict[str, tuple[str, ...]]:
        """Return the public list of each of the active party's categorical columns."""
        lists = categories_of(self.booster)
        return {column: lists[column] for column in self.columns if column in lists}


@dataclass(frozen=True, slots=True, repr=False)
class PassivePart:
    """A passive party's part.

    Attributes:
        columns, aliases: its own and its public name of each feature, in order.
        categories: public list of each categorical column.
    """

    table: PrivateTable
    columns: tuple[str, ...]
    aliases: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


Part = ActivePart | PassivePart
P = TypeVar("P", bound=Part)


@dataclass(frozen=True, slots=True, repr=False)
class Commitment:
    """A commitment to a part.

    Security: the digest may be published: without the nonce it does not let anyone test guesses of thresholds or
        leaves, and it fits one part only.
    """

    digest: bytes
    nonce: bytes


def commit(part: Part, randomness: RandomSource = OS_RANDOMNESS) -> Commitment:
    """Commit to a part."""
    nonce = randomness.bytes(COMMITMENT_BYTES)
    return Commitment(_digest(_content(part), nonce), nonce)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What all parties know of a model: who made it in which job, and what each committed to. Public.

    Attributes:
        job_id: of the training.
        active: name of the active party.
        sites: all parties, in the job's order.
        commitments: digests in the order of ``sites``.
    """

    job_id: str
    active: str
    sites: tuple[str, ...]
    commitments: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if self.active not in self.sites or len(set(self.sites)) != len(self.sites):
            raise ValueError("a model belongs to different sites, of which one is the active party")
        if len(self.commitments) != len(self.sites) or any(len(c) != COMMITMENT_BYTES for c in self.commitments):
            raise ValueError(f"one commitment of {COMMITMENT_BYTES} bytes for each site")

    @property
    def model_id(self) -> str:
        """Return the model's id: equal at all parties exactly if they mean the same parts."""
        fields = encode_fields(f"{DOMAIN}/vertical model", self.job_id, self.active, *self.sites, *self.commitments)
        return hashlib.sha256(fields).hexdigest()


@dataclass(frozen=True, slots=True, repr=False)
class StoredPart(Generic[P]):
    """A part that was read and checked, and the model that it belongs to."""

    part: P
    identity: ModelIdentity


def write_part(folder: Path, site: str, part: Part, identity: ModelIdentity, commitment: Commitment) -> Path:
    """Write a site's part into the run's folder, whole or not at all, readable by the owner of the process alone.

    Privacy: stays at the site. A passive party's file holds its thresholds, the active party's the leaves.

    Args:
        commitment: what ``commit`` returned for this part; its digest is the site's in ``identity``.

    Raises:
        ValueError: the identity does not hold this commitment.
    """
    content = _content(part)
    if _own_commitment(identity, site) != commitment.digest or _digest(content, commitment.nonce) != commitment.digest:
        raise ValueError("the part is not what the site committed to")
    document = {
        "format": _FORMAT,
        "model_id": identity.model_id,
        "job_id": identity.job_id,
        "active": identity.active,
        "commitments": {s: c.hex() for s, c in zip(identity.sites, identity.commitments, strict=True)},
        "nonce": commitment.nonce.hex(),
        "part": content,
    }
    name = ACTIVE_FILE if isinstance(part, ActivePart) else PASSIVE_FILE
    return write_durably(folder / name, json.dumps(document).encode(), mode=0o600)


def read_part(path: Path, site: str, expected: type[P]) -> StoredPart[P]:
    """Read a site's part.

    Args:
        expected: ``ActivePart`` or ``PassivePart``; ``Part`` where the file decides which of them the site is.

    Raises:
        ConfigurationError: no such file, damaged, of another site or another kind, or changed since the training.
    """
    try:
        document = json.loads(path.read_bytes())
        if document["format"] != _FORMAT:
            raise ConfigurationError(_UNREADABLE)
        identity = _identity(document)
        part = _part(document["part"])
        nonce = bytes.fromhex(document["nonce"])
    except FileNotFoundError:
        raise ConfigurationError(f"{site} holds no part of this model") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        # The reason could quote values of the file.
        raise ConfigurationError(_UNREADABLE) from None
    if not isinstance(part, expected) or isinstance(part, ActivePart) != (identity.active == site):
        raise ConfigurationError(f"{site} holds another part of this model than its role in the job needs")
    if site not in identity.sites or not hmac.compare_digest(
        _own_commitment(identity, site), _digest(document["part"], nonce)
    ):
        raise ConfigurationError(f"the part of the model at {site} was changed, or is another site's")
    return StoredPart(part, identity)


def find_part(folders: Path, inputs: Path, job_id: str, site: str, expected: type[P]) -> StoredPart[P]:
    """Read a site's part of the model that a training job made.

    Args:
        folders: where the site keeps its runs.
        inputs: the site's input folder: ``<job id>.<site>.json`` there stands in for a run folder that is gone.

    Raises:
        ConfigurationError: as ``read_part``.
    """
    if not job_id or Path(job_id).name != job_id or job_id in (".", "..") or "\0" in job_id or "\\" in job_id:
        raise ConfigurationError("the model is named by the id of the job that trained it")
    names = {ActivePart: [ACTIVE_FILE], PassivePart: [PASSIVE_FILE]}.get(expected, [ACTIVE_FILE, PASSIVE_FILE])
    for path in (*(folders / job_id / name for name in names), inputs / f"{job_id}.{site}.json"):
        if path.is_file() and not path.is_symlink():
            return read_part(path, site, expected)
    simulated = ""
    if job_id == "simulate_job":
        simulated = (
            " (so FLARE's simulator calls every job, and empties its sites' folders before each: there run `veilboost "
            "site-setup DIR --example` again after the training, which keeps the model)"
        )
    raise ConfigurationError(
        f"{site} holds no part of the model of job {job_id}{simulated}: neither in its runs nor as "
        f"{job_id}.{site}.json in its input folder. Remedy: let the job name the id of the vertical training job whose "
        "model is meant, as `nvflare job list` shows it."
    )


def _content(part: Part) -> dict[str, Any]:
    """Return a part as JSON values, the form that commitments cover."""
    if isinstance(part, PassivePart):
        lists = {"categories": {name: list(words) for name, words in part.categories.items()}}
        table = json.loads(table_to_json(part.table, part.aliases))
        return {"columns": list(part.columns), **table, **(lists if part.categories else {})}
    return {
        "columns": list(part.columns),
        "parties": [[party.site, list(party.aliases)] for party in part.parties],
        "best_round": part.best_round,
        "booster": json.loads(part.booster),
    }


def _part(content: Mapping[str, Any]) -> Part:
    """Read what ``_content`` made. Raises: ValueError, TypeError, KeyError, ConfigurationError."""
    columns = _names(content["columns"])
    if "splits" in content:
        table, aliases = table_from_json(json.dumps({name: content[name] for name in ("aliases", "splits")}))
        if len(columns) != len(aliases):
            raise ValueError("one alias for each column")
        categories = {str(name): _names(words) for name, words in content.get("categories", {}).items()}
        _check_sets(table, columns, categories)
        return PassivePart(table, columns, aliases, categories)
    parties = tuple(PartyColumns(str(site), _names(aliases)) for site, aliases in content["parties"])
    best_round = content["best_round"]
    if best_round is not None and type(best_round) is not int:
        raise TypeError("best_round")
    part = ActivePart(model_bytes(content["booster"]), columns, parties, best_round)
    _check_booster(part)
    return part


def _check_sets(table: PrivateTable, columns: tuple[str, ...], categories: Mapping[str, tuple[str, ...]]) -> None:
    if not set(categories) <= set(columns) or not all(categories.values()):
        raise ValueError("categories of an unknown column")
    for split in table.values():
        words = categories.get(columns[split.feature])
        if (split.categories is None) != (words is None) or (words and max(split.categories or (0,)) >= len(words)):
            raise ValueError("a split by categories that the column does not have")


def _check_booster(part: ActivePart) -> None:
    n_columns = len(part.columns) + sum(len(party.aliases) for party in part.parties)
    for tree in structures(part.booster):
        if tree.feature.size and not 0 <= tree.feature.min() <= tree.feature.max() < max(n_columns, 1):
            raise ValueError("a split of an unknown column")
        foreign = (tree.left >= 0) & (tree.feature >= len(part.columns))
        if np.any(tree.threshold[foreign]):
            raise ValueError("a threshold of another party")
        if any(tree.feature[node] >= len(part.columns) for node in tree.categories):
            raise ValueError("a set of categories of another party")


def _names(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError("names")
    return tuple(names)


def _identity(document: Mapping[str, Any]) -> ModelIdentity:
    commitments = {str(site): bytes.fromhex(text) for site, text in document["commitments"].items()}
    identity = ModelIdentity(
        str(document["job_id"]), str(document["active"]), tuple(commitments), tuple(commitments.values())
    )
    if identity.model_id != document["model_id"]:
        raise ValueError("the model id does not follow from the commitments")
    return identity


def _own_commitment(identity: ModelIdentity, site: str) -> bytes:
    return identity.commitments[identity.sites.index(site)]


def _digest(content: Mapping[str, Any], nonce: bytes) -> bytes:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(encode_fields(f"{DOMAIN}/vertical part", nonce, canonical)).digest()


# The end of a job that leaves a model in several hands: every party commits to its part before any is written.


def conclude_part(attempt: SiteAttempt, active: str, part: Part, n_rounds: int) -> tuple[bytes, Path]:
    """Commit to this party's part together with the others, show that all mean the same model, write the part.

    Args:
        n_rounds: of the job, on which all parties must agree too.

    Returns:
        The HMAC of what all have equal; where the part lies.

    Raises:
        ProtocolError: a party's commitment is none, or the parties ended with different models.
    """
    context, commitment = attempt.context, commit(part)
    digests = attempt.gather_sealed("parts of the model", commitment.digest)
    if any(len(digest) != COMMITMENT_BYTES for digest in digests):
        raise ProtocolError("a party's commitment to its part of the model is not one")
    identity = ModelIdentity(context.job_id, active, context.sites, tuple(digests))
    hmac = attempt.conclude(f"{identity.model_id} {n_rounds}".encode())
    return hmac, write_part(attempt.folder.path, context.site, part, identity, commitment)


# How much each feature contributes to a vertical model, under the aliases that the parties chose.
#
# Importance needs gains, covers and counts of splits, which the active party's part holds for all features; thresholds
# play no role. The numbers are those of the centralized model, with its names in the place of the aliases.


KINDS = ("weight", "gain", "total_gain", "cover", "total_cover")
FILE_NAME = "importance.csv"


@dataclass(frozen=True, slots=True)
class FeatureImportance:
    """One feature. Attributes: party: "" for the active party; kinds as XGBoost's ``get_score`` names them."""

    party: str
    feature: str
    weight: float
    gain: float
    total_gain: float
    cover: float
    total_cover: float


def feature_importance(part: ActivePart, first_round: int = 0, end_round: int | None = None) -> list[FeatureImportance]:
    """Return the importance of every feature, the greatest total gain first; a feature without a split has zeros.

    Privacy: local at the active party, which has learnt gains and covers in training.
    """
    document = json.loads(part.booster)
    features = [("", name) for name in part.columns]
    features += [(party.site, alias) for party in part.parties for alias in party.aliases]
    # By position: XGBoost would not take the same name twice, and parties may choose equal ones.
    document["learner"]["feature_names"] = [f"f{i}" for i in range(len(features))]
    document["learner"]["feature_types"] = ["float"] * len(features)
    document["learner"]["gradient_booster"]["model"]["cats"] = NO_LISTS
    booster = xgb.Booster(model_file=bytearray(model_bytes(document)))
    booster = booster[first_round : end_round if end_round is not None else booster.num_boosted_rounds()]
    scores: dict[str, dict[str, Any]] = {kind: booster.get_score(importance_type=kind) for kind in KINDS}
    rows = [
        FeatureImportance(party, feature, **{kind: float(scores[kind].get(f"f{i}", 0.0)) for kind in KINDS})
        for i, (party, feature) in enumerate(features)
    ]
    return sorted(rows, key=lambda row: -row.total_gain)


def write_importance(folder: Path, rows: list[FeatureImportance]) -> Path:
    """Write ``importance.csv``. Privacy: aliases and sums over rows; no threshold."""
    lines = [(row.party, row.feature, *(repr(getattr(row, kind)) for kind in KINDS)) for row in rows]
    return write_atomically(folder / FILE_NAME, inert_csv([("party", "feature", *KINDS), *lines]))
