"""MACs on what a site gives to all others through a server: for each peer one, under the secret of the two.

Sums are checked by tags (sum_tags.py). What the server hands on as it is carries these: a message that is changed,
withheld and replaced, taken from another place in the job, or put in another site's name does not pass, even if the
server pools with a third site, which knows what all sites share.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from he_processors.errors import AuthenticationError, ProtocolError
from he_processors.key_agreement import DOMAIN, Field, derive_key, encode_fields

MAC_BYTES = 16


class PairMacs:
    """The MACs of one site, for one session.

    Security: HMAC-SHA256, cut to 128 bits, under a key of the pair and session that serves nothing else, over the
        place of the message, its sender, its recipient and its content. Contents are not hidden.
    """

    def __init__(self, session_id: bytes, rank: int, pair_secrets: Mapping[int, bytes]) -> None:
        """Derive the keys. Args: rank: this site's; pair_secrets: by rank of each other site."""
        self._rank, self._world = rank, len(pair_secrets) + 1
        self._keys = {peer: derive_key(secret, session_id, "pair-macs") for peer, secret in pair_secrets.items()}

    @property
    def size(self) -> int:
        """Bytes behind the content: a MAC for every site, of which the own one is empty (zeros)."""
        return MAC_BYTES * self._world

    def append(self, content: bytes, place: tuple[Field, ...]) -> bytes:
        """Return the content with a MAC for each site behind it.

        Args:
            content: what all sites get.
            place: names the message within the session: at least its never-reset counter.

        Raises:
            ProtocolError: the session is closed.
        """
        digest = hashlib.sha256(content).digest()
        macs = [
            bytes(MAC_BYTES) if peer == self._rank else self._mac(peer, self._rank, peer, digest, place)
            for peer in range(self._world)
        ]
        return b"".join((content, *macs))

    def check(self, sender: int, message: bytes, place: tuple[Field, ...]) -> bytes:
        """Return the content of what another site appended its MACs to.

        Raises:
            AuthenticationError: this is not what that site gave at this place.
            ProtocolError: the session is closed.
        """
        start = len(message) - self.size
        content = message[: max(start, 0)]
        mine = message[start + MAC_BYTES * self._rank :][:MAC_BYTES] if start >= 0 else b""
        digest = hashlib.sha256(content).digest()
        if not hmac.compare_digest(mine, self._mac(sender, sender, self._rank, digest, place)):
            raise AuthenticationError("it is not what that site has sent: the server or a site has changed it")
        return content

    def close(self) -> None:
        """Forget all keys; every later call fails."""
        self._keys.clear()

    def _mac(self, peer: int, sender: int, recipient: int, digest: bytes, place: tuple[Field, ...]) -> bytes:
        key = self._keys.get(peer)
        if key is None:
            raise ProtocolError("the session of these MACs is closed, or has no such site")
        return hmac.digest(key, encode_fields(f"{DOMAIN}/pair-mac", sender, recipient, digest, *place), "sha256")[
            :MAC_BYTES
        ]
