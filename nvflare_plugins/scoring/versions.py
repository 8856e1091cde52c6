"""A site's models by name and version, and which version of a name is in use.

Jobs leave models under their ids. A site gives a model a name; each further one under the same name is the next
version, and is used from then on until the site goes back to another. Nothing is copied or deleted: a version says
which job's model it is, with the hash of its bytes, and one file holds all names (``models.json`` among the runs), and
changes whole or not at all.

Privacy: purely local, for the owner of the process alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import locked, write_private
from nvflare_plugins.base.formatting import counted, fitted, printable
from nvflare_plugins.pages.run_record import RunRecord, records_in

NAMES_FILE = "models.json"
MERGED = "merged_model.json"
_LOCK = ".models.lock"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_NUMBER = re.compile(r"[0-9]{1,9}")
_HASH_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a name. Attributes: sha256: hex, of the model's bytes; named: ISO 8601 in UTC."""

    job: str
    file: str
    sha256: str
    named: str


@dataclass(frozen=True, slots=True)
class Named:
    """All versions of a name, the first one 1. Attributes: current: the version in use."""

    versions: tuple[Version, ...]
    current: int


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that a job has left. Attributes: data_set: that it was trained on; metrics: of its last round."""

    job: str
    file: str
    title: str
    finished: str
    data_set: str
    n_rounds: int
    sha256: str
    metrics: Mapping[str, float]


class ModelVersions:
    """The names of one site's models."""

    def __init__(self, runs: Path, check: Callable[[Path], None] = lambda path: None) -> None:
        """Read a site's names.

        Args:
            runs: the folder of the site's runs.
            check: raises for a model that may not be put in use.
        """
        self._runs, self._check = runs, check

    def found(self, unread: list[str] | None = None) -> list[FoundModel]:
        """Return the models that jobs have left, the oldest first; runs without one are left out.

        Args:
            unread: gets what is the matter with runs whose record is damaged, or of another version.
        """
        models = [model for folder, record in records_in(self._runs, unread) for model in _models_of(folder, record)]
        return sorted(models, key=lambda one: (one.finished, one.job))

    def names(self) -> dict[str, Named]:
        """Return all names. Raises: ConfigurationError: the file is damaged."""
        try:
            return _read_names((self._runs / NAMES_FILE).read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError:
            raise ConfigurationError(
                f"{NAMES_FILE} in {self._runs} cannot be read: restore it, or move it away and name the models again"
            ) from None

    def add(self, name: str, job: str) -> int:
        """Make a job's model the next version of a name, in use from now on; return its number.

        Raises:
            ConfigurationError: no such name can be, the job has left no model, or it has this version already.
            ScoringError: the model is none that one site can score with.
        """
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"{printable(name)!r} can be no name of models: letters and digits of ASCII, '_', '-' and '.', "
                "at most 64"
            )
        unread: list[str] = []
        model = next((one for one in reversed(self.found(unread)) if one.job == job), None)
        if model is None:
            others = f"; {counted(len(unread), 'run')} cannot be read: {'; '.join(unread)}" if unread else ""
            raise ConfigurationError(
                f"no job {printable(job)!r} has left a model among the runs: `veilboost models` lists those that have"
                + others
            )
        from nvflare_plugins.scoring.model import FinishedModel  # XGBoost, which listing models does not need

        FinishedModel.read(self._runs / job / model.file)
        self._check(self._runs / job / model.file)
        fresh = Version(job, model.file, model.sha256, datetime.now(UTC).isoformat(timespec="seconds"))
        with self._changing() as names:
            versions = names[name].versions if name in names else ()
            for number, one in enumerate(versions, start=1):
                if (one.job, one.sha256) == (fresh.job, fresh.sha256):
                    raise ConfigurationError(
                        f"job {job} is version {number} of {name} already: `veilboost models rollback {name} {number}` "
                        "puts it in use"
                    )
            names[name] = Named((*versions, fresh), len(versions) + 1)
        return len(versions) + 1

    def use(self, name: str, version: int) -> int:
        """Put a version of a name in use; return the one that was. Raises: ConfigurationError: there is none such."""
        with self._changing() as names:
            before = self._of(names, name, version)
            self._check(self._intact(name, version, before.versions[version - 1]))
            names[name] = Named(before.versions, version)
        return before.current

    def path(self, reference: str) -> Path:
        """Return the model file of NAME, or of NAME@VERSION.

        Raises:
            ConfigurationError: there is no such version, or its file has changed since it was named.
        """
        name, _, number = reference.partition("@")
        names = self.names()
        if number and not is_number(number):
            raise ConfigurationError(f"{printable(reference)!r}: a version is a number, as in {printable(name)}@3")
        if name not in names:
            raise ConfigurationError(
                f"there is no model called {printable(name)!r}: `veilboost models` lists them, `veilboost models add` "
                "gives a job's model a name"
            )
        version = int(number) if number else names[name].current
        return self._intact(name, version, self._of(names, name, version).versions[version - 1])

    @staticmethod
    def is_reference(text: str) -> bool:
        """Tell whether a text can be NAME or NAME@VERSION."""
        return _NAME.fullmatch(text.partition("@")[0]) is not None

    def _of(self, names: Mapping[str, Named], name: str, version: int) -> Named:
        if name not in names or not 1 <= version <= len(names[name].versions):
            known = f"it has 1 to {len(names[name].versions)}" if name in names else "there is no such name"
            raise ConfigurationError(f"{printable(name)} has no version {version} ({known}): see `veilboost models`")
        return names[name]

    def _intact(self, name: str, number: int, version: Version) -> Path:
        path = self._runs / version.job / version.file
        if not path.is_file() or _sha256(path) != version.sha256:
            raise ConfigurationError(
                f"{name}@{number} is {version.file} of job {version.job}, which is not there or has changed since it "
                "was named: restore it, or use another version"
            )
        return path

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, Named]]:
        """Read, change and write the names, one process at a time."""
        if not self._runs.is_dir():
            raise ConfigurationError(f"there are no runs in {self._runs}")
        with locked(self._runs / _LOCK):
            names = self.names()
            yield names
            document = {"format": 1, "names": {name: dataclasses.asdict(one) for name, one in names.items()}}
            write_private(self._runs / NAMES_FILE, json.dumps(document, indent=1).encode())


def is_number(text: str) -> bool:
    """Tell whether a text can be the number of a version."""
    return _NUMBER.fullmatch(text) is not None


def called_by_job(names: Mapping[str, Named]) -> dict[tuple[str, str], list[str]]:
    """Return (job, hash of the model) -> NAME@VERSION of it; the version in use has a star."""
    of_job: dict[tuple[str, str], list[str]] = {}
    for name, one in sorted(names.items()):
        for number, version in enumerate(one.versions, start=1):
            mark = "*" if number == one.current else ""
            of_job.setdefault((version.job, version.sha256), []).append(f"{name}@{number}{mark}")
    return of_job


def describe(found: list[FoundModel], names: Mapping[str, Named], replaced: Mapping[str, str]) -> str:
    """Return models and names as a table for a person; the version in use has a star.

    Args:
        replaced: jobs with rows of persons who are forgotten -> the job that replaces each.
    """
    of_job = called_by_job(names)
    lines = [f"{'finished':<20} {'name':<16} {'data set':<16} {'rounds':>6} {'sha256':<{_HASH_SHOWN}}  job, metrics"]
    for model in found:
        called = ", ".join(of_job.get((model.job, model.sha256), [])) or "-"
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in model.metrics.items())
        lines.append(
            f"{model.finished[:19]:<20} {called:<16} {fitted(model.data_set, 16)} {model.n_rounds:>6} "
            f"{model.sha256[:_HASH_SHOWN]}  {model.job}{f', {metrics}' if metrics else ''}"
            + (f"; forgotten: job {replaced[model.job]} replaces it" if model.job in replaced else "")
        )
    return "\n".join(printable(line, 400) for line in [*lines, "* in use"])


def _models_of(folder: Path, record: RunRecord) -> Iterator[FoundModel]:
    for file in dict.fromkeys(filter(None, (record.model, MERGED))):
        path = folder / file
        if path.name != file or not path.is_file():
            continue
        metrics = record.rounds[-1].metrics if record.rounds else {}
        data = record.data[0].name if record.data else ""
        yield FoundModel(
            folder.name, file, record.title, record.finished, data, _n_rounds(path, record), _sha256(path), metrics
        )


def _n_rounds(path: Path, record: RunRecord) -> int:
    """Return the rounds of a model, those of the job that it continues included."""
    try:
        booster = json.loads(path.read_bytes())["learner"]["gradient_booster"]
        return len(booster.get("gbtree", booster)["model"]["iteration_indptr"]) - 1
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return len(record.rounds)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class _NamesFile:
    format: Literal[1]
    names: dict[str, Named]


@cache
def _reader() -> TypeAdapter[_NamesFile]:
    return TypeAdapter(_NamesFile)


def _read_names(content: bytes) -> dict[str, Named]:
    """Return what the file holds. Raises: ValueError: it is none, or names what is no file beside the runs."""
    found = _reader().validate_json(content, strict=True)
    for name, one in found.names.items():
        parts = (part for version in one.versions for part in (version.job, version.file))
        is_named = _NAME.fullmatch(name) and 1 <= one.current <= len(one.versions)
        if not is_named or any(Path(part).name != part for part in parts):
            raise ValueError("no such name, version or file")
    return found.names
