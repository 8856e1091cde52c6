"""The profiles of horizontal sums: what opens the processor of each, and who learns what under it.

Every profile is one ``SumProfile``. Those that come with VeilBoost stand in ``BUILT_IN``; others are objects of this
class in packages of others, registered as entry points of the group ``veilboost.processors`` and loaded only where the
site's policy names them (site/policy.py). Homomorphic keys are drawn for one attempt and die with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError
from he_processors.key_agreement import derive_key
from he_processors.masks import MessageLabel, PairwiseMasks
from nvflare_plugins.attempt.session import Session
from nvflare_plugins.evidence.audit import plugin_facts
from nvflare_plugins.pooled.job import SHORT_WORD_BITS, WORD_BITS
from nvflare_plugins.site.policy import SitePolicy, load_plugin
from nvflare_plugins.site.profiles import THREAT_MODELS, Statement
from nvflare_plugins.wire import profiles
from nvflare_plugins.wire.aggregation import OpenSum
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.envelope import Codec, Kind
from nvflare_plugins.wire.sums import ProtectedSums

LEAST_CAPACITY_BITS, MOST_CAPACITY_BITS = 32, 62
_LONGEST_TEXT = 2000
_MOST_NOTES = 10


class SumContext:
    """What a processor gets of the open session of one attempt; its keys are the profile's own.

    Attributes:
        rank: this site's number, from 0.
        world: number of sites.
    """

    def __init__(self, channel: Channel, session: Session, codec: Codec, name: str) -> None:
        self.rank, self.world = channel.rank, channel.world
        self._channel, self._session, self._codec, self._name = channel, session, codec, name

    @property
    def masks(self) -> PairwiseMasks:
        """The session's masks. They mask one message a counter, and are closed with the session."""
        return self._session.masks

    def pair_key(self, peer: int) -> bytes:
        """Return 32 bytes that this site and the site of rank ``peer`` share, and no one else.

        Security: do not keep it: the session forgets its keys when the attempt ends.

        Raises:
            ProtocolError: there is no such peer, or the session is closed.
        """
        secret = self._session.pair_secrets.get(peer)
        if secret is None:
            raise ProtocolError("a plugin asked for a key of no other site, or after the session was closed")
        low, high = min(self.rank, peer), max(self.rank, peer)
        return derive_key(secret, self._session.session_id, "plugin/pair", self._name, low, high)

    def group_key(self) -> bytes:
        """Return 32 bytes that all sites share, and the server does not. As ``pair_key``."""
        if not self._session.group_secret:
            raise ProtocolError("a plugin asked for a key after the session was closed")
        return derive_key(self._session.group_secret, self._session.session_id, "plugin/group", self._name)

    def share_secret(self, secret: bytes | None) -> bytes:
        """Hand a secret of rank 0 to every site, sealed; the others give None. All sites call it at the same point."""
        return self._session.share_secret(secret)

    def publish(self, public: bytes) -> bytes:
        """Give public bytes of rank 0 to the server and all sites; the others give theirs, which are not sent.

        Privacy: the server reads them.
        """
        return self._channel.gather(Kind.HE_PUBLIC, public if self.rank == 0 else b"", self._codec)[0]


@dataclass(frozen=True, slots=True)
class SumProfile:
    """One way to protect the sums of horizontal jobs.

    Attributes:
        name: of the profile; a plugin's is its entry point's, and jobs call it ``plugin.NAME``.
        open: makes the processor of one attempt at one site.
        statement: who learns what, in the plugin author's own words; evidence and report carry it.
        codec: how its messages travel, which decides what the server does. A plugin's is ``Codec.PLUGIN``: each message
            is as many 64-bit words as it has values, and the server adds these modulo 2^64 and knows nothing else. Or
            it is ``Codec.PLUGIN_BYTES``: messages are bytes of any form, and the server adds them by ``add``.
        capacity_bits: sums of at most 2^capacity_bits in magnitude are exact, whatever the number of sites; the
            processor may say more. Wide messages are exact to 2^59 under every profile; beyond that no sum is used,
            because sums are tagged (he_processors/sum_tags.py).
        add: of ``Codec.PLUGIN_BYTES``: opens an empty sum at the server, which gets what rank 0 has published
            (``SumContext.publish``) and the number of values. It holds no key. Servers load it where their policy pins
            the plugin's files.
    """

    name: str
    open: Callable[[SumContext], profiles.SumProcessor]
    statement: Statement
    codec: Codec = Codec.PLUGIN
    capacity_bits: int = profiles.WIDE_CAPACITY_BITS
    add: OpenSum | None = None


def _open_bfv(context: SumContext) -> profiles.SumProcessor:
    # Imported here: the lattice library takes long to load and most jobs do without it.
    from he_processors.bfv import BfvProcessor

    return profiles.BfvSums(_share_key(BfvProcessor, context), context.masks)


def _open_ckks(context: SumContext) -> profiles.SumProcessor:
    from he_processors.ckks import CkksProcessor

    return profiles.CkksSums(_share_key(CkksProcessor, context), context.masks)


def _share_key(scheme: Any, context: SumContext) -> Any:
    """Rank 0 draws the key and seals it to every peer; the server gets public parameters only."""
    secret = scheme.generate(context.world) if context.rank == 0 else None
    processor = scheme(context.share_secret(secret))
    if processor.n_summands != context.world:
        raise ProtocolError("the homomorphic key of the sites was made for another number of sites")
    public = processor.public_parameters()
    if context.publish(public) != public:
        raise ProtocolError("the public parameters of the homomorphic scheme do not belong to the shared key")
    return processor


_OPENED: dict[str, tuple[Callable[[SumContext], profiles.SumProcessor], Codec, int]] = {
    "plain": (lambda context: profiles.PlainSums(), Codec.PLAIN, profiles.WIDE_CAPACITY_BITS),
    "masks": (lambda context: profiles.MaskedSums(context.masks), Codec.MASKED, profiles.WIDE_CAPACITY_BITS),
    "bfv": (_open_bfv, Codec.BFV, 40),
    "ckks": (_open_ckks, Codec.CKKS, 40),
}
BUILT_IN = {
    name: SumProfile(name, open_it, THREAT_MODELS[name], codec, capacity_bits)
    for name, (open_it, codec, capacity_bits) in _OPENED.items()
}


_SHORT: dict[Codec, Callable[[Session], profiles.SumProcessor]] = {
    Codec.PLAIN: lambda session: profiles.ShortPlainSums(),
    Codec.MASKED: lambda session: profiles.ShortMaskedSums(session.masks),
}
"""What protects histograms in words of 32 bits, by the codec of all other sums; there are no others."""


@dataclass(frozen=True, slots=True)
class ChosenProfile:
    """The profile of a job at this site.

    Attributes:
        release: "distribution version" of its plugin, which must be equal at all sites; "" for our own profiles.
        facts: what the evidence records of it.
    """

    profile: SumProfile
    release: str
    facts: dict[str, str]


def choose_profile(policy: SitePolicy, name: str) -> ChosenProfile:
    """Return the profile that a job names; a plugin is loaded if the site's policy names it.

    Raises:
        PolicyRefusal, ConfigurationError: see ``load_plugin``; or what it loaded is no profile of that name.
    """
    plugin = profiles.plugin_of(name)
    if plugin is None:
        return ChosenProfile(BUILT_IN[name], "", {})
    loaded, pin = load_plugin(policy, plugin), policy.plugin(plugin)
    try:
        profile = check_plugin(loaded, plugin)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"plugin {plugin} of {pin} at {policy.site} is not usable: {error}. Policy key: plugins.{plugin}. Remedy: "
            "another version of it (nvflare_plugins/conformance tells its author more)."
        ) from None
    return ChosenProfile(profile, str(pin), plugin_facts(plugin, pin.distribution, pin.version, profile.statement))


_OF_PLUGINS = (Codec.PLUGIN, Codec.PLUGIN_BYTES)


def check_plugin(profile: object, name: str) -> SumProfile:
    """Return what a plugin says of itself, if it is usable. Raises: ConfigurationError."""
    if not isinstance(profile, SumProfile):
        raise ConfigurationError("its entry point is no SumProfile")
    if profile.name != name:
        raise ConfigurationError("it calls itself by another name than its entry point")
    if profile.codec not in _OF_PLUGINS:
        raise ConfigurationError("its codec is neither Codec.PLUGIN nor Codec.PLUGIN_BYTES, as a plugin's has to be")
    if (profile.codec is Codec.PLUGIN_BYTES) != callable(profile.add):
        raise ConfigurationError("it has no `add` for its messages of bytes, or one for words, which the server adds")
    bits = profile.capacity_bits
    if type(bits) is not int or not LEAST_CAPACITY_BITS <= bits <= MOST_CAPACITY_BITS:
        raise ConfigurationError(f"its capacity_bits are not from {LEAST_CAPACITY_BITS} to {MOST_CAPACITY_BITS}")
    if not isinstance(profile.statement, Statement):
        raise ConfigurationError("it does not state who learns what")
    texts = [getattr(profile.statement, field.name) for field in fields(Statement) if field.name != "notes"]
    notes = profile.statement.notes
    if not isinstance(notes, tuple) or len(notes) > _MOST_NOTES or not all(map(_is_statement, (*texts, *notes))):
        raise ConfigurationError(
            f"its statement is not made of texts of 1 to {_LONGEST_TEXT} printable characters, with at most "
            f"{_MOST_NOTES} notes"
        )
    return profile


def _is_statement(text: object) -> bool:
    return isinstance(text, str) and 0 < len(text) <= _LONGEST_TEXT and text.isprintable()


class CheckedSums:
    """A plugin's processor, of which nothing leaves the site and nothing is believed but what has the right form."""

    def __init__(self, processor: profiles.SumProcessor, profile: SumProfile) -> None:
        if processor.codec is not profile.codec or processor.capacity_bits < profile.capacity_bits:
            raise ProtocolError("the plugin opened another processor than its profile says")
        self.codec = profile.codec
        self.capacity_bits = min(processor.capacity_bits, profiles.WIDE_CAPACITY_BITS)
        self._processor = processor

    def protect(self, integers: NDArray[np.int64], label: MessageLabel, *, wide: bool = False) -> bytes:
        """Return what the plugin makes of the integers. Raises: ProtocolError, if the server could not add it."""
        payload = self._processor.protect(integers, label, wide=wide)
        if not isinstance(payload, bytes) or (self._has_words and len(payload) != 8 * label.n_values):
            raise ProtocolError(
                f"{label.kind}: the plugin did not make "
                f"{f'{label.n_values} words of 8 bytes' if self._has_words else 'bytes'} of its values"
            )
        return payload

    def reveal(self, payload: bytes, label: MessageLabel, *, wide: bool = False) -> NDArray[np.int64]:
        """Return the sum that the plugin reads. Raises: ProtocolError, if it has another form."""
        if self._has_words and len(payload) != 8 * label.n_values:
            raise ProtocolError(f"{label.kind}: {len(payload)} bytes where {label.n_values} words of 8 bytes are due")
        total = self._processor.reveal(payload, label, wide=wide)
        if not isinstance(total, np.ndarray) or total.dtype != np.int64 or total.shape != (label.n_values,):
            raise ProtocolError(f"{label.kind}: the plugin did not return {label.n_values} integers")
        return total

    @property
    def _has_words(self) -> bool:
        return self.codec is Codec.PLUGIN


def open_processor(profile: SumProfile, channel: Channel, session: Session) -> profiles.SumProcessor:
    """Open the processor of a profile for one attempt."""
    processor = profile.open(SumContext(channel, session, profile.codec, profile.name))
    return CheckedSums(processor, profile) if profile.codec in _OF_PLUGINS else processor


def open_sums(
    profile: SumProfile, channel: Channel, session: Session, finest_exponent: int | None, word_bits: int = WORD_BITS
) -> ProtectedSums:
    """Return the protected sums of a job under its profile. Args: word_bits: of its histograms."""
    processor = open_processor(profile, channel, session)
    pairs = _SHORT[profile.codec](session) if word_bits == SHORT_WORD_BITS else None
    return ProtectedSums(channel, processor, session.tags, finest_exponent, pairs=pairs)
