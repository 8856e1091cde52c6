"""The site's memory of which ids took part in which alignment.

Every alignment tells the other parties which of their ids this site has. Whoever may align again and again with other
sets of his own can ask for one id after another; and two alignments that differ by a party, or by some rows, show the
difference. So the ids of a data set take part in one alignment, whose result later jobs reuse; a further one needs this
site's consent.

``reserve`` comes first and is durable; ``mark_sent`` comes right before the first blinded id leaves, and from then on
the alignment counts whatever happens. ``cancel`` is for one that ended before; if the process dies before, the next
``reserve`` takes its reservation back.

Files, all of mode 0600 in a folder of mode 0700: ``alignments.json`` (readable by a person), ``ids/`` (sorted 8-byte
keyed hashes), ``key``, ``lock``, and a mark for each job that has reserved and sent nothing yet. Without the key the
hashes tell nothing; with it a guessed id can be tested, which is why both stay at the site.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_components.ledger_journal import Alive
from he_processors.errors import ConfigurationError, PolicyRefusal
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.data_sets.identity import overlap_of
from nvflare_plugins.failures import REGISTRY_TEXT, DataRefusal
from nvflare_plugins.files import write_private
from nvflare_plugins.site.policy.policy import SitePolicy
from nvflare_plugins.site.policy.values import Consents

FOLDER = "alignments"
_FILE = "alignments.json"
_VERSION = 1
_KEY_BYTES = 32
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class AlignmentRun:
    """One alignment of one data set.

    Attributes:
        ids: names the file with the hashes of its ids.
        sent: whether a blinded id may have left. Entries of older versions do not say; they count.
    """

    job_id: str
    data_set: str
    sites: tuple[str, ...]
    n_ids: int
    ids: str
    started: str
    sent: bool = True


class AlignmentRegistry:
    """The alignments of one site. Privacy: purely local; holds keyed hashes of ids, and counts."""

    def __init__(self, root: Path, site: str, consents: Consents, randomness: RandomSource = OS_RANDOMNESS) -> None:
        self._root, self._site, self._consents = root, site, consents
        self._alive = Alive(root / _FILE)
        for folder in (root, root / "ids"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            self._key = self._load_key(randomness)

    @classmethod
    def open(cls, policy: SitePolicy) -> AlignmentRegistry:
        """Open the registry that a site's policy names."""
        return cls(policy.registry / FOLDER, policy.site, policy.consents)

    def fingerprint(self, ids: Sequence[bytes]) -> str:
        """Return a keyed hash of the ids in their order, which changes when any row comes, goes or moves."""
        digest = hashlib.blake2b(key=self._key, digest_size=16, person=b"rows")
        for name in ids:
            digest.update(len(name).to_bytes(4, "little") + name)
        return digest.hexdigest()

    def reserve(
        self, data: Mapping[str, Sequence[bytes]], job_id: str, sites: Sequence[str]
    ) -> tuple[AlignmentRun, ...]:
        """Allow one job to align data sets, and remember it.

        Args:
            data: canonical ids by name of the data set.

        Raises:
            PolicyRefusal: a data set of that name was aligned before, and the policy has no consent.
            DataRefusal: ids of one of them were aligned before under another name.
            ConfigurationError: the registry is damaged.
        """
        with self._locked():
            earlier = self._without_dead()
            fresh = []
            for name, ids in data.items():
                hashes = self._hashes(ids)
                if not self._consents.recompute_with_changes:
                    self._refuse_repetition(name, hashes, earlier)
                file = f"{hashlib.sha256(hashes.tobytes()).hexdigest()[:32]}.u64"
                write_private(self._root / "ids" / file, hashes.tobytes())
                fresh.append(AlignmentRun(job_id, name, tuple(sites), len(ids), file, _now(), sent=False))
            self._alive.hold(job_id)
            self._write([*earlier, *fresh])
        return tuple(fresh)

    def mark_sent(self, runs: Sequence[AlignmentRun]) -> None:
        """Note durably that blinded ids leave now: the alignment counts from here on."""
        with self._locked():
            self._write([replace(run, sent=True) if run in runs else run for run in self._read()])
            self._forget_marks(runs)

    def cancel(self, runs: Sequence[AlignmentRun]) -> None:
        """Take reservations back; only if no blinded id has left."""
        with self._locked():
            self._write([run for run in self._read() if replace(run, sent=False) not in runs])
            self._forget_marks(runs)

    def _without_dead(self) -> list[AlignmentRun]:
        """Return the alignments that count: not those whose process ended before it sent anything."""
        runs = self._read()
        dead = [run for run in runs if run.sent is False and not self._alive.is_held(run.job_id)]
        self._forget_marks(dead)
        return [run for run in runs if run not in dead]

    def _forget_marks(self, runs: Sequence[AlignmentRun]) -> None:
        for job_id in {run.job_id for run in runs}:
            self._alive.release(job_id)

    def _refuse_repetition(self, name: str, hashes: NDArray[np.uint64], earlier: Sequence[AlignmentRun]) -> None:
        for run in earlier:
            is_named = run.data_set == name
            if is_named or overlap_of(hashes, self._load(run)):
                text = (
                    f"{self._site} aligned rows of data set {name!r} before, in job {run.job_id}: a second alignment "
                    "would answer further questions about which ids it has. Policy key: "
                    "consents.recompute_with_changes. Remedy: use the alignment of that job, or ask "
                    f"{self._site} to consent."
                )
                raise PolicyRefusal(text) if is_named else DataRefusal(text, REGISTRY_TEXT)

    def _hashes(self, ids: Sequence[bytes]) -> NDArray[np.uint64]:
        """Shapes: result: uint64[n_ids], sorted."""
        digests = b"".join(hashlib.blake2b(name, digest_size=8, key=self._key).digest() for name in ids)
        return np.sort(np.frombuffer(digests, dtype="<u8"))

    def _load(self, run: AlignmentRun) -> NDArray[np.uint64]:
        try:
            content = (self._root / "ids" / run.ids).read_bytes()
        except OSError:
            raise self._damaged(f"ids/{run.ids} is missing") from None
        if len(content) != _HASH_BYTES * run.n_ids:
            raise self._damaged(f"ids/{run.ids} is damaged")
        return np.frombuffer(content, dtype="<u8")

    def _read(self) -> list[AlignmentRun]:
        path = self._root / _FILE
        if not path.exists():
            return []
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["version"] != _VERSION:
                raise ValueError("unknown version")
            return [AlignmentRun(**{**run, "sites": tuple(run["sites"])}) for run in document["runs"]]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self._damaged(f"{_FILE} cannot be read") from None

    def _write(self, runs: Sequence[AlignmentRun]) -> None:
        document: dict[str, Any] = {"version": _VERSION, "runs": [asdict(run) for run in runs]}
        write_private(self._root / _FILE, (json.dumps(document, indent=1) + "\n").encode())

    def _load_key(self, randomness: RandomSource) -> bytes:
        path = self._root / "key"
        if not path.exists():
            if (self._root / _FILE).exists():
                raise self._damaged("its key is missing")
            write_private(path, randomness.bytes(_KEY_BYTES))
        if not path.is_file() or len(key := path.read_bytes()) != _KEY_BYTES:
            raise self._damaged("its key is damaged")
        return key

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _damaged(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self._site}: {what}, in the registry of alignments. Restore it from a backup; starting an empty one "
            "forgets which ids were aligned."
        )


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
