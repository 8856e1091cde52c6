"""Tags of sums and MACs of gathers: a server that changes either is noticed by every site that opens it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from he_processors import field61
from he_processors.errors import AuthenticationError, ProtocolError
from he_processors.field61 import MODULUS
from he_processors.key_agreement import DOMAIN, Field, derive_key, encode_fields, expand_key, extract_key
from he_processors.masks import MessageLabel, ResidueMasks, uniform_residues
from he_processors.randomness import OS_RANDOMNESS, RandomSource, random_uint64

# Tags of sums: a server that changes a sum over sites is noticed by every site that opens it.
#
# Every site sends, with its vector x of exact integers, two tags t = sum_i r_i x_i modulo p = 2^61 - 1. Their
# coefficients r come from a key that all sites share and the server lacks. Tags are masked like the values, but modulo
# p (masks.py), and the server adds them with the values. A site that opens the sum X compares sum_i r_i X_i
# with the opened tags, and believes nothing of X before. What the sites add modulo p for other reasons (words whose sum
# is zero only if all are) travels with the tags, as residues, and is tagged like values.
#
# Coefficients. Value i of block b = i div m, m = 1024, has r_i = s_b rho^(i mod m); rho and all s_b are independent and
# uniform modulo p, two sets of them for the two tags, expanded by AES-256-CTR from a key that HKDF derives from the
# group secret, the session (job, attempt, every site's nonce) and all that fixes the message: never-reset counter,
# kind, phase, number of values and of residues. With an r_i drawn for every value the error would be p^-2, at the price
# of two words of keystream a value, made twice: about what the masks of three sites cost again. With r_i = rho^i it
# would cost what it costs now and grow with the message, (n/p)^2. Blocks cost as little as powers and have one bound
# for any length.
#
# Statement. Let the sites be honest and their keys unknown to the server, let every site's integers add up to at most
# 2^59 in magnitude in each place, and let AES-256 and HKDF-SHA256 be indistinguishable from random. The server may see
# all messages, answer each site as it likes, and stop. Then in one message:
#
# 1. Each site accepts the true sum, if it is what comes back. 2. The chance that some of W sites accepts anything else
# is at most W (m/p)^2, below W 2^-101, whatever the number of values, what they are, and what the server knows of them.
# 3. Whether a site accepts tells the server nothing but whether it changed the sum.
#
# Proof. (1) The tags are linear and exact modulo p, and 2^59 < p/2. (2) In the server's view all masked tags and
# residues of the W sites are uniform (up to 2^-67 each) and independent of the coefficients: the pairwise masks make
# those of any W - 1 sites uniform, and the blinding their sum. So its view is independent of rho and s; what it makes
# of it opens, at one site, to values X' and residues Y' with differences d from the true ones, and to tags that differ
# by e_1 and e_2 from the true ones, d and e independent of the coefficients. Two vectors of magnitude below p/2 that
# differ do so by less than p in each place, hence d is not 0 modulo p unless X' = X and Y' = Y: this is what the range
# check below is for, since a change by a multiple of p would leave every tag right. The site accepts if sum_i r_i d_i =
# e_k for both tags. Some block b has a d that is not 0 throughout; as a polynomial in rho it has at most m - 1 roots,
# so that it is 0 with a chance of at most (m - 1)/p. If it is not, the equation holds for at most one s_b given all the
# rest: 1/p. Both tags have coefficients of their own, which squares m/p; W sites check apart, and a site that accepted
# the truth has told nothing new, hence the factor W. (3) By (2) every change is refused, but for that chance, in one
# text that does not depend on why.
#
# What it does not hold against: a server that pools with a site, which knows the coefficients; a site that lies about
# its own numbers. Sites that change roles inside a sum change nothing, because a sum does not depend on their order. A
# sum of ciphertexts that opens wrong once in 2^40 messages (ckks.py) is refused that often without anyone's guilt; the
# sums of masks and BFV never are. Not in constant time.
#
# Reference: Wegman and Carter, "New hash functions and their use in authentication and set equality" (1981); Agrawal
# and Boneh, "Homomorphic MACs: MAC-Based Integrity for Network Coding" (2009), for tags that are added with what they
# tag.


N_TAGS = 2
CAPACITY_BITS = 59
"""Sums of at most 2^59 in magnitude are exact and checked: below p/2, which 2^60 is not."""

LARGEST_SUM = field61.LARGEST
"""What an opened sum may be in magnitude."""

_BLOCK = 1024
_Coefficients = tuple[NDArray[np.uint64], NDArray[np.uint64]]
_NONE: tuple[bytes, _Coefficients] = (b"", (np.zeros((0, 1), np.uint64), np.zeros((0, 0), np.uint64)))


class SumTags:
    """Makes and checks the tags of one site, for one session.

    Security: what ``protect`` returns may be shown to the server: it is uniform modulo p to anyone who lacks a pair key
        of this site. See the statement above. As with masks, a counter protects once.
    """

    def __init__(self, session_id: bytes, rank: int, pair_secrets: Mapping[int, bytes], group_secret: bytes) -> None:
        """Prepare the keys of a session; arguments as of ``PairwiseMasks``. Raises: ValueError."""
        self._masks = ResidueMasks(session_id, rank, pair_secrets, group_secret)
        self._key = extract_key(derive_key(group_secret, session_id, "sum-tags"))
        self._latest = _NONE  # those of a message serve to make and to check

    def protect(
        self, values: NDArray[np.int64] | None, residues: NDArray[np.uint64], label: MessageLabel
    ) -> NDArray[np.uint64]:
        """Return residues and tags of a message, masked modulo p.

        Shapes: values: int64[label.n_values]; residues: uint64[k], each below p; result: uint64[k + 2], or uint64[k]
            without values.

        Args:
            values: of which this site's are to be protected; None masks the residues and makes no tag.
            residues: what else is added, modulo p.
            label: names the message.

        Raises:
            ProtocolError: the counter has been used already, or the session is closed.
        """
        tags = residues[:0] if values is None else self._tags(values, residues, label)[0]
        plain = np.concatenate([residues, tags])
        return self._masks.mask(plain, label.counter)

    def open(
        self, values: NDArray[np.int64] | None, total: NDArray[np.uint64], label: MessageLabel
    ) -> NDArray[np.uint64]:
        """Check an opened sum, and return the sums of the residues modulo p.

        Shapes: values: int64[label.n_values], the opened sum; total: uint64[k + 2] as it came back from the server, or
            uint64[k] without values; result: uint64[k].

        Raises:
            AuthenticationError: this is not the sum of what the sites sent, residues that are none among it.
            ProtocolError: a message that was not protected here.
        """
        if total.size and int(total.max()) >= MODULUS:
            raise changed_sum(label)
        opened = self._masks.unblind(total, label.counter)
        if values is None:
            return opened
        residues, tags = opened[:-N_TAGS], opened[-N_TAGS:]
        true, is_in_range = self._tags(values, residues, label)
        if true.tolist() != tags.tolist() or not is_in_range:
            raise changed_sum(label)
        return residues

    def close(self) -> None:
        """Forget all keys; every later call fails."""
        self._masks.close()
        self._key = b""
        self._latest = _NONE

    def _tags(
        self, values: NDArray[np.int64], residues: NDArray[np.uint64], label: MessageLabel
    ) -> tuple[NDArray[np.uint64], bool]:
        """Return both tags, and whether all values are at most ``LARGEST_SUM``. Shapes: tags: uint64[2]."""
        if values.size != label.n_values:
            raise ValueError(f"the label announces {label.n_values} values, the array holds {values.size}")
        powers, scales = self._coefficients(values.size, residues.size, label)
        return field61.combine(np.ascontiguousarray(values), residues.view(np.int64), powers, scales)

    def _coefficients(self, n_values: int, n_residues: int, label: MessageLabel) -> _Coefficients:
        """Return rho^0 to rho^(m - 1) and s_b of each tag of a message. Shapes: uint64[2, m], uint64[2, blocks]."""
        fields = (label.counter, label.kind, label.phase, n_values, n_residues)
        info = encode_fields(f"{DOMAIN}/sum-tags/coefficients", *fields)
        if info != self._latest[0]:
            n_blocks = -(-n_values // _BLOCK) + -(-n_residues // _BLOCK)
            drawn = uniform_residues(expand_key(self._key, info), MODULUS, N_TAGS * (1 + n_blocks))
            of_tags = drawn.reshape(N_TAGS, -1)
            powers = field61.powers(of_tags[:, 0].copy(), _BLOCK)
            self._latest = info, (powers, of_tags[:, 1:].copy())
        return self._latest[1]


def changed_sum(label: MessageLabel) -> AuthenticationError:
    """Return the one error of a sum that is not right, whatever is wrong with it: other words would tell of values."""
    return AuthenticationError(
        f"{label.kind} ({label.phase}): what came back is not the sum of what the sites sent: the server or a site has "
        "changed it, by intent or by a fault. Nothing of it was used; the job ends. Remedy: compare the evidence of "
        "sites and server, and submit the job anew when it is clear"
    )


def random_flags(is_set: NDArray[np.bool_], randomness: RandomSource = OS_RANDOMNESS) -> NDArray[np.uint64]:
    """Return residues whose sum over sites is 0 where no site sets a flag, and uniform where some site does.

    Shapes: is_set: bool[k]; result: uint64[k].
    Privacy: the sum tells whether some site has set a flag, not how many have. It is 0 by chance once in 2^61 times.
    """
    key = random_uint64(4, randomness).tobytes()
    return np.where(is_set, uniform_residues(key, MODULUS, is_set.size), np.uint64(0))


# MACs on what a site gives to all others through a server: for each peer one, under the secret of the two.
#
# Sums are checked by tags. What the server hands on as it is carries these: a message that is changed,
# withheld and replaced, taken from another place in the job, or put in another site's name does not pass, even if the
# server pools with a third site, which knows what all sites share.


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
