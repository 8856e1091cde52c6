"""How often a party has answered for each of its rows, over all jobs: predictions tell about rows, so they are limited.

Every row counts once for each job that asks for it. The charge is on the disk before the first answer leaves; a job
that fails afterwards has spent it all the same. So that one party's refusal does not spend the budgets of others, all
parties check first, tell each other, and then charge.

Privacy: purely local, mode 0600. Rows are kept as hashes under a key of this site, so that a row is recognised in the
    next job, in whatever order the rows come. A refusal tells neither which rows nor how many.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, PolicyRefusal
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.files import write_private
from nvflare_plugins.site.memory.stored_arrays import read_arrays
from nvflare_plugins.site.policy.policy import SitePolicy

FOLDER = "predictions"
_KEY_BYTES = 32


class PredictionBudget:
    """The budget of one data set at one site. Processes wait for each other."""

    def __init__(
        self, policy: SitePolicy, data_set: str, randomness: RandomSource = OS_RANDOMNESS, in_training: bool = False
    ):
        """Open the budget.

        Args:
            data_set: the name in the site's policy: counts stay when the file behind it changes.
            in_training: the rows are those of a training's evaluation set, for which a job has other remedies.
        """
        self._site, self._rules, self._in_training = policy.site, policy.vertical, in_training
        self._folder = policy.registry / FOLDER
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = self._folder / f"{hashlib.sha256(data_set.encode()).hexdigest()[:32]}.npz"
        with self._locked():
            self._key = self._load_key(randomness)

    def check(self, row_ids: Sequence[str]) -> None:
        """Refuse what ``charge`` would refuse, and charge nothing. Raises: as ``charge``."""
        with self._locked():
            self._charged(row_ids)

    def charge(self, row_ids: Sequence[str]) -> None:
        """Charge a job's rows, durably; nothing is charged if any of them may not be asked for.

        Args:
            row_ids: ids of the rows that the job asks for; a row that comes twice counts twice.

        Raises:
            PolicyRefusal: more rows than one job may ask for, or a row that was asked for too often before.
            ConfigurationError: the file is damaged.
        """
        with self._locked():
            keys, counts = self._charged(row_ids)
            content = io.BytesIO()
            np.savez(content, keys=keys, counts=counts)
            write_private(self._path, content.getvalue())

    def _charged(self, row_ids: Sequence[str]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the counts with those of a job. Shapes: uint64[n], int64[n]. Raises: as ``charge``."""
        if len(row_ids) > self._rules.predictions_per_job:
            raise self._refusal("predictions_per_job", "answers for fewer rows in one job", "name fewer rows (rows)")
        asked, times = np.unique(self._hashes(row_ids), return_counts=True)
        keys, counts = self._read()
        everyone = np.union1d(keys, asked)
        total = np.zeros(everyone.size, dtype=np.int64)
        total[np.searchsorted(everyone, keys)] = counts
        total[np.searchsorted(everyone, asked)] += times
        if (total[np.searchsorted(everyone, asked)] > self._rules.predictions_per_row).any():
            raise self._refusal(
                "predictions_per_row",
                "has answered for rows of this job as often as it does",
                "name other rows (rows, data_set)",
            )
        return everyone, total

    def _hashes(self, row_ids: Sequence[str]) -> NDArray[np.uint64]:
        digests = b"".join(hashlib.blake2b(one.encode(), digest_size=8, key=self._key).digest() for one in row_ids)
        return np.frombuffer(digests, dtype="<u8")

    def _read(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        if not self._path.exists():
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        try:
            stored = read_arrays(self._path)
            keys, counts = stored["keys"], stored["counts"]
        except (OSError, ValueError, KeyError):
            raise self._damaged("its counts of predictions cannot be read") from None
        is_fit = keys.dtype == np.uint64 and counts.dtype == np.int64 and keys.shape == counts.shape == (keys.size,)
        if not is_fit or (counts < 0).any() or (keys[1:] <= keys[:-1]).any():
            raise self._damaged("its counts of predictions do not fit together")
        return keys, counts

    def _load_key(self, randomness: RandomSource) -> bytes:
        path = self._folder / "key"
        if not path.exists():
            if any(self._folder.glob("*.npz")):
                raise self._damaged("the key of its rows is missing")
            write_private(path, randomness.bytes(_KEY_BYTES))
        if not path.is_file() or len(key := path.read_bytes()) != _KEY_BYTES:
            raise self._damaged("the key of its rows is damaged")
        return key

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _refusal(self, key: str, what: str, remedy: str) -> PolicyRefusal:
        if self._in_training:
            remedy = "another eval_data_set, or none"
        return PolicyRefusal(f"{self._site} {what}. Policy key: vertical.{key}. Remedy: {remedy}, or ask {self._site}.")

    def _damaged(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self._site}: {what}. Restore the folder {FOLDER!r} of the registry from a backup; an empty one forgets "
            "what was answered."
        )
