"""How the active party reaches the passive ones: a request goes out, its answer is collected later."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from he_processors.errors import JobAborted, ProtocolError
from nvflare_plugins.vertical.protocol.messages import Answer, PartySchema, Request

A = TypeVar("A", bound=Answer | None)


class PassiveLink(Protocol):
    """Carries requests to one passive party in order; FLARE's transport seals them end to end."""

    def ask(self, request: Request) -> Future[Answer | None]:
        """Send a request; do not wait. The future fails with a VeilBoostError if the party or the way to it does."""

    def flush(self) -> None:
        """Let requests go that wait for further ones to travel with; waiting for an answer does as much."""


@dataclass(frozen=True, slots=True)
class Party:
    """One passive party as the active party knows it.

    Attributes:
        first_column: where its columns start among those of all parties.
    """

    name: str
    schema: PartySchema
    first_column: int
    link: PassiveLink

    @property
    def columns(self) -> slice:
        """Return the party's place among the columns of all parties."""
        return slice(self.first_column, self.first_column + len(self.schema.n_bins))


def place_parties(
    n_own_columns: int, introductions: Sequence[tuple[str, PartySchema, PassiveLink]]
) -> tuple[Party, ...]:
    """Order the columns of all parties: the active party's first, then each passive party's."""
    parties, column = [], n_own_columns
    for name, schema, link in introductions:
        parties.append(Party(name, schema, column, link))
        column += len(schema.n_bins)
    return tuple(parties)


def collect(party: Party, future: Future[Any], expected: type[A], deadline_s: float) -> A:
    """Wait for an answer of the expected type.

    Raises:
        JobAborted: none came in time.
        ProtocolError: another type of answer came.
    """
    try:
        answer = future.result(deadline_s)
    except FutureTimeout:
        raise JobAborted(f"{party.name} did not answer within {deadline_s:.0f} s") from None
    if not isinstance(answer, expected):
        raise ProtocolError(f"{party.name} answered with {type(answer).__name__} where {expected.__name__} is due")
    return answer
