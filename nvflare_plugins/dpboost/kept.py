"""What an attempt of a job that waits for lost sites leaves to the next: a key, and the server's answers.

The key decides which tree a row belongs to. Under another one a row would be in several trees of an ensemble, which the
accounting takes for disjoint; so the first attempt's is kept, and a site that lacks it gets it from the others.

The answers are what the server has released so far, the same at all sites. A site keeps each one before it sends
anything that depends on it. So no site lacks more than the last, unless its disk has lost more; and what any site holds
is asked of the server no more: the sites give it to each other. Only the exchange in which a site was lost is repeated;
what the server does with that one is in server.py. Whether what a site was given is what it has paid for, its own
ledger says, whose queries hash key and answers. Of a tree for which no site says that it has paid there is no
answer: a site that lies can invent the tree at which the job stands, and no model.

The file is ``dpboost_kept`` in the run's folder, mode 0600, written whole and durably, and removed when all sites have
the model, or the site's part in the job is over for another reason: a hash of the rest, the key, then the answers in
order, 8 bytes each.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.files import write_private

KEY_BYTES = HASH_BYTES = 32
FILE = "dpboost_kept"
_log = logging.getLogger(__name__)


class KeptAnswers:
    """One site's key and answers, of all attempts of a job.

    Privacy: the answers are noised, and all sites have got them; the key is the sites' alone, and never leaves them but
        sealed from the server.

    Attributes:
        key: that assigns rows to trees; known once the sites have agreed on it.
    """

    def __init__(self, folder: Path, is_kept: bool) -> None:
        """Read what earlier attempts have left; a damaged file counts as lost.

        Args:
            is_kept: the job waits for lost sites; otherwise nothing is read or written.
        """
        self._path, self._is_kept = folder / FILE, is_kept
        self.key, self._answers, self._n_taken = b"", b"", 0
        if is_kept and self._path.is_file():
            content = self._path.read_bytes()
            digest, kept = content[:HASH_BYTES], content[HASH_BYTES:]
            if hashlib.sha256(kept).digest() == digest and len(kept) >= KEY_BYTES:
                self.key, self._answers = kept[:KEY_BYTES], kept[KEY_BYTES:]
            else:
                _log.warning("what earlier attempts of the job have left here is damaged: the other sites are asked")

    def offer(self) -> bytes:
        """Return what tells the other sites who holds most: key, size and hash of the answers; or nothing."""
        if not self.key:
            return b""
        return b"".join([self.key, len(self._answers).to_bytes(8, "little"), hashlib.sha256(self._answers).digest()])

    def agree(self, attempt: SiteAttempt, offers: Sequence[bytes], fresh_key: bytes) -> None:
        """Take the key that any site holds, or else the fresh one, and the answers of the site that has most of them.

        Args:
            offers: ``offer`` of every site, in rank order.

        Raises:
            ProtocolError: the sites hold different keys or answers.
        """
        if any(len(offer) not in (0, KEY_BYTES + 8 + HASH_BYTES) for offer in offers):
            raise ProtocolError("a site's account of the answers that it holds has another size than it should")
        keys = {offer[:KEY_BYTES] for offer in offers if offer} or {fresh_key}
        if len(keys) > 1:
            raise ProtocolError("the sites hold different keys of earlier attempts: submit the job anew")
        (self.key,) = keys
        sizes = [_size(offer) for offer in offers]
        if len({offer[KEY_BYTES:] for offer in offers}) > 1 and max(sizes) > 0:
            holder = sizes.index(max(sizes))
            given = attempt.gather_sealed("kept answers", self._answers if holder == attempt.channel.rank else b"")
            if len(given[holder]) != sizes[holder] or not given[holder].startswith(self._answers):
                raise ProtocolError(
                    "the sites got different answers from the server in an earlier attempt: submit the job anew, to be "
                    "charged anew"
                )
            self._answers = given[holder]
        self._write()

    def take(self, n_values: int) -> NDArray[np.int64] | None:
        """Return the next answer if the sites hold it. Shapes: int64[n_values].

        Raises:
            ProtocolError: what they hold ends in the midst of an answer.
        """
        begin, end = self._n_taken, self._n_taken + 8 * n_values
        if begin == len(self._answers):
            return None
        if end > len(self._answers):
            raise ProtocolError("the answers of earlier attempts end in the midst of one: submit the job anew")
        self._n_taken = end
        return np.frombuffer(self._answers[begin:end], dtype="<i8").astype(np.int64)

    def add(self, answer: NDArray[np.int64]) -> None:
        """Keep an answer of the server, durably: call it before anything that depends on the answer leaves."""
        if self._is_kept:
            self._answers += answer.astype("<i8").tobytes()
            self._n_taken = len(self._answers)
            self._write()

    def drop(self) -> None:
        """Remove the file: all sites have the model."""
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self._is_kept:
            kept = self.key + self._answers
            write_private(self._path, hashlib.sha256(kept).digest() + kept)


def _size(offer: bytes) -> int:
    return int.from_bytes(offer[KEY_BYTES : KEY_BYTES + 8], "little")
