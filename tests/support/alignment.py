"""Parties of an alignment in one process: each in a thread, with a real channel, session and aggregator."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from he_processors.errors import VeilBoostError
from nvflare_plugins.attempt.session import Session, open_session
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.channel import Channel
from tests.support.federation import DirectTransport, run_in_threads

TIMEOUT_S = 30.0


def party_names(n: int) -> tuple[str, ...]:
    return tuple(f"party-{chr(ord('a') + i)}" for i in range(n))


def policy_of(folder: Path, party: str, **document: Any) -> SitePolicy:
    """Return a policy that lets small sets be aligned unless told otherwise."""
    document.setdefault("vertical", {"min_intersection": 1})
    document.setdefault("unsigned_sessions", True)
    return SitePolicy.from_dict(document, workspace=folder / party, site=party)


def run_parties(
    folder: Path,
    n: int,
    take_part: Callable[[Channel, Session, SitePolicy], Any],
    policies: Mapping[str, Mapping[str, Any]] | None = None,
    job_id: str = "job",
    recorders: Mapping[str, Any] | None = None,
    **hooks: Any,
) -> list[Any]:
    """Let every party take part; in rank order, what each returned or the error that ended it.

    Args: hooks: of ``run_in_threads``.
    """
    names, attempt = party_names(n), os.urandom(16)

    def run(name: str, transport: DirectTransport) -> Any:
        policy = policy_of(folder, name, **dict((policies or {}).get(name, {})))
        channel = Channel(name, names, job_id, attempt, transport, TIMEOUT_S)
        channel.recorder = (recorders or {}).get(name)
        return take_part(
            channel, open_session(channel, Identity.unsigned(name), policy, "alignment", b"b" * 32), policy
        )

    def reason(error: Exception) -> str:
        return str(error) if isinstance(error, VeilBoostError) else type(error).__name__

    outcomes = run_in_threads(Aggregator(names, attempt, 0.0), names, run, reason=reason, **hooks)
    return [outcomes[name] for name in names]


def encode(ids: Sequence[str]) -> list[bytes]:
    return [one.encode() for one in ids]
