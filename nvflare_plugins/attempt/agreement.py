"""What all sites must have equal before anything private is sent, compared under the group key.

The server relays sealed documents and learns sizes only.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple, Protocol

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.checks import is_whole
from nvflare_plugins.data_sets.declaration import MOST_ROWS
from nvflare_plugins.data_sets.schema import Schema, compare
from nvflare_plugins.formatting import printable
from nvflare_plugins.growth.arithmetic import ARITHMETICS
from nvflare_plugins.site.policy.values import Floors
from nvflare_plugins.wire.catalogue import Kind
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.envelope import Codec, pack_list, unpack_list

PLUGIN = "plugin"  # among the versions: distribution and version of the plugin that protects the sums, or ""
ARITHMETIC = "arithmetic"  # among the versions: of trees that the sites grow themselves, whatever XGBoost each has
_PURPOSE = "agreement"
_MAX_DOCUMENT = 1 << 24


class GroupSeal(Protocol):
    """What the agreement needs of a session."""

    def seal_to_all(self, plaintext: bytes, purpose: str) -> bytes: ...

    def open_from(self, rank: int, sealed: bytes, purpose: str) -> bytes: ...


def versions() -> dict[str, str]:
    """Return the versions that every site reports; those of XGBoost and VeilBoost must be equal."""
    names = ("xgboost", "veilboost", "nvflare", "numpy", "tenseal")
    return {**{name: _version(name) for name in names}, "python": platform.python_version()}


@cache
def _version(name: str) -> str:
    """Return the version of a distribution as it was first asked for: reading it parses all that its author says."""
    return version(name)


@dataclass(frozen=True, slots=True)
class Terms:
    """One site's terms.

    Attributes:
        versions: see ``versions``.
        job: the job as JSON values.
        parameters: checked XGBoost parameters as JSON values.
        schema: columns, types, categories, label.
        start: what training starts from: keyed hash of an initial model, where there is one.
        checkpoints: keyed hash of each checkpoint to go on from, with the cuts beside it, by number of finished rounds.
        floors: the least that the site's policy asks for.
    """

    versions: Mapping[str, str]
    job: Mapping[str, Any]
    parameters: Mapping[str, Any]
    schema: Schema
    start: Mapping[str, str]
    checkpoints: Mapping[str, str]
    floors: Floors = Floors(0, 0, 0)

    def to_bytes(self) -> bytes:
        """Return a canonical encoding."""
        parts = (self.versions, self.job, self.parameters, self.start, self.checkpoints, asdict(self.floors))
        return pack_list([*(json.dumps(part, sort_keys=True).encode() for part in parts), self.schema.to_bytes()])

    @classmethod
    def from_bytes(cls, data: bytes) -> Terms:
        """Parse a peer's terms. Raises: ProtocolError."""
        if len(data) > _MAX_DOCUMENT:
            raise ProtocolError("a peer's terms are too long")
        *documents, schema = unpack_list(data, 7)
        try:
            parsed = [json.loads(document) for document in documents]
        except (ValueError, RecursionError):
            raise ProtocolError("a peer's terms are not valid JSON") from None
        if not all(isinstance(part, dict) for part in parsed):
            raise ProtocolError("a peer's terms are not of the expected form")
        found_versions, job, parameters, start, checkpoints, floors = parsed
        known = {f.name for f in fields(Floors)}
        if set(floors) != known or not all(is_whole(value, 0) and value <= MOST_ROWS for value in floors.values()):
            raise ProtocolError("a peer's terms are not of the expected form")
        return cls(found_versions, job, parameters, Schema.from_bytes(schema), start, checkpoints, Floors(**floors))


class Agreed(NamedTuple):
    """What follows from the terms of all sites.

    Attributes:
        n_done: finished rounds of the latest checkpoint that all sites hold alike; 0 if there is none.
        floors: the least that any site's policy asks for, which is the largest of all.
        arithmetic: the lowest that any site named; "" where XGBoost grows the trees.
    """

    n_done: int
    floors: Floors
    arithmetic: str


def agree(channel: Channel, session: GroupSeal, mine: Terms) -> Agreed:
    """Compare the terms of all sites.

    Raises:
        ConfigurationError: a difference, named.
    """
    sealed = channel.gather(Kind.AGREEMENT, session.seal_to_all(mine.to_bytes(), _PURPOSE), Codec.SEALED)
    mine = Terms.from_bytes(mine.to_bytes())  # as the peers see it: JSON knows no tuples
    common, floors, arithmetic = dict(mine.checkpoints), mine.floors, mine.versions.get(ARITHMETIC, "")
    for rank, site in enumerate(channel.sites):
        if rank == channel.rank:
            continue
        theirs = Terms.from_bytes(session.open_from(rank, sealed[rank], _PURPOSE))
        compare_versions(mine.versions, theirs.versions, site)
        compare_documents("the job", mine.job, theirs.job, site)
        compare_documents("the parameters", mine.parameters, theirs.parameters, site)
        compare(mine.schema, theirs.schema, site)
        compare_documents("the starting point", mine.start, theirs.start, site)
        floors = floors.largest(theirs.floors)
        arithmetic = lower_arithmetic(arithmetic, theirs.versions.get(ARITHMETIC, ""))
        common = {n: h for n, h in common.items() if theirs.checkpoints.get(n) == h}
    return Agreed(max((int(n) for n in common if n.isdigit()), default=0), floors, arithmetic)


def lower_arithmetic(one: str, other: str) -> str:
    """Return the earlier of two arithmetics."""
    return min(one, other, key=lambda name: tuple(int(part) for part in name.split(".") if part))


def compare_versions(mine: Mapping[str, str], theirs: Mapping[str, Any], site: str) -> None:
    """Refuse a peer that runs another XGBoost, VeilBoost or plugin. Raises: ConfigurationError.

    Where the sites grow the trees themselves their XGBoosts may differ, and each names the arithmetic of its own.
    """
    if ARITHMETIC in mine:
        names = ("veilboost", *({PLUGIN} & set(mine)))
        if theirs.get(ARITHMETIC) not in tuple(ARITHMETICS):
            raise ConfigurationError(
                f"{site} would grow trees in no arithmetic that is known here ({', '.join(ARITHMETICS)}): install the "
                "same version of VeilBoost"
            )
    else:
        names = ("xgboost", "veilboost", *({PLUGIN} & set(mine)))
    for name in names:
        if theirs.get(name) != mine[name]:
            raise ConfigurationError(
                f"{site} runs {name} {_shown(theirs.get(name))} where this site runs {mine[name]}: install the same "
                "version at every site"
            )


def _shown(version: object) -> str:
    """Return what a peer calls its version, short and without anything that could steer a terminal or forge a line."""
    return printable(version[:40]) if isinstance(version, str) else "of no known version"


def compare_documents(what: str, mine: Mapping[str, Any], theirs: Mapping[str, Any], site: str) -> None:
    """Refuse a peer whose document differs; the first difference is named. Raises: ConfigurationError."""
    for name in sorted(set(mine) | set(theirs)):
        if mine.get(name) != theirs.get(name):
            raise ConfigurationError(f"{site} has another value of {str(name)[:80]!r} in {what} than this site")
