"""Which tree of an ensemble a record belongs to: a keyed hash of the record alone.

The paper draws subsets of fixed sizes, which depend on the number of rows; then one more row moves others, and trees
do not use disjoint data in the sense of parallel composition. A hash of the record's own identifier moves nobody else,
and every site can compute it for its rows without asking anyone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MIN_KEY_BYTES = 16
_PURPOSE = b"dpboost rows"


def assign_records(
    key: bytes, site: str, record_ids: Sequence[str], ensemble: int, shares: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Assign each record to one tree, independently, with probability ``shares[tree]``.

    Shapes:   shares: float64[n_trees], adding up to 1; result: int64[n_records].
    Security: the guarantee does not rest on the key's secrecy; the key keeps anyone from choosing identifiers that
        land in one tree.
    Privacy:  depends on nothing but the record's identifier, so a neighbouring data set moves no other record.

    Args:
        key: the job's key, the same at all sites.
        site: name of the site.
        record_ids: stable identifiers; a row number is none, because removing a row would move those after it.
        ensemble: number of the ensemble; each has an assignment of its own.
        shares: probability of each tree.

    Raises:
        ValueError: the key is too short, or an identifier is empty.
        TypeError: an identifier is not a text.
    """
    if not MIN_KEY_BYTES <= len(key) <= hashlib.blake2b.MAX_KEY_SIZE:
        raise ValueError(f"the key of the assignment needs {MIN_KEY_BYTES} to {hashlib.blake2b.MAX_KEY_SIZE} bytes")
    if not all(isinstance(record, str) for record in record_ids):
        raise TypeError("record identifiers are texts, never row numbers")
    if not all(record_ids):
        raise ValueError("a record identifier must not be empty")
    begun = hashlib.blake2b(key=key, digest_size=8, person=_PURPOSE)
    name = site.encode()
    begun.update(ensemble.to_bytes(4, "big") + len(name).to_bytes(4, "big") + name)

    def word(record: str) -> int:
        hashed = begun.copy()
        hashed.update(record.encode())
        return int.from_bytes(hashed.digest(), "big")

    words = np.fromiter((word(record) for record in record_ids), dtype=np.uint64, count=len(record_ids))
    ends = np.cumsum(shares)[:-1]
    return np.searchsorted(ends, np.ldexp(words.astype(np.float64), -64), side="right").astype(np.int64)
