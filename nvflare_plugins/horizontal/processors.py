"""Opens the processor of a job's profile; homomorphic keys are drawn for this attempt and die with it."""

from __future__ import annotations

from typing import Any

from he_processors.errors import ProtocolError
from nvflare_plugins.attempt.session import Session
from nvflare_plugins.wire.catalogue import Kind
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.envelope import Codec
from nvflare_plugins.wire.profiles import BfvSums, CkksSums, MaskedSums, PlainSums, Profile, SumProcessor
from nvflare_plugins.wire.sums import ProtectedSums


def open_sums(profile: Profile, channel: Channel, session: Session, finest_exponent: int | None) -> ProtectedSums:
    """Return the protected sums of a job under its profile."""
    masks = MaskedSums(session.masks)
    return ProtectedSums(channel, _processor(profile, masks, channel, session), masks, finest_exponent)


def _processor(profile: Profile, masks: MaskedSums, channel: Channel, session: Session) -> SumProcessor:
    if profile is Profile.PLAIN:
        return PlainSums()
    if profile is Profile.MASKS:
        return masks
    # Imported here: the lattice library takes long to load and most jobs do without it.
    if profile is Profile.BFV:
        from he_processors.bfv import BfvProcessor

        return BfvSums(_share_key(BfvProcessor, Codec.BFV, channel, session), session.masks)
    from he_processors.ckks import CkksProcessor

    return CkksSums(_share_key(CkksProcessor, Codec.CKKS, channel, session), session.masks)


def _share_key(scheme: Any, codec: Codec, channel: Channel, session: Session) -> Any:
    """Rank 0 draws the key and seals it to every peer; the server gets public parameters only."""
    secret = scheme.generate(channel.world) if channel.rank == 0 else None
    processor = scheme.from_secret(session.share_secret(secret))
    if processor.n_summands != channel.world:
        raise ProtocolError("the homomorphic key of the sites was made for another number of sites")
    public = processor.public_parameters()
    published = channel.gather(Kind.HE_PUBLIC, public if channel.rank == 0 else b"", codec)
    if published[0] != public:
        raise ProtocolError("the public parameters of the homomorphic scheme do not belong to the shared key")
    return processor
