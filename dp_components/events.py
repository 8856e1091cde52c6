"""Privacy events: frozen values that say completely which random mechanism was run, and the relation they protect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_components.errors import UnknownEvent

# The neighbouring relation: which two data sets no one shall be able to tell apart.
#
# A guarantee without it means nothing, and the factor between two relations is the commonest error in private learning;
# so it is a type that every sensitivity, event and ledger carries, and two different ones are never added up.


class NeighbouringRelation(Enum):
    """What may differ between neighbouring data sets. Protected is a record, never a whole site.

    Attributes:
        ADD_OR_REMOVE_ROW: one row is there or not: the relation of Maddock et al. and the default.
        REPLACE_ROW: one row has other features and another label; twice the sensitivity of a sum.
        CHANGE_LABEL: one row has another label; its features, and so the nodes it falls into, are public.
        CHANGE_VALUE: one feature value of one row differs (FederBoost's element level).
    """

    ADD_OR_REMOVE_ROW = "add_or_remove_row"
    REPLACE_ROW = "replace_row"
    CHANGE_LABEL = "change_label"
    CHANGE_VALUE = "change_value"


# Privacy events: frozen values that say completely which random mechanism was run, and compute nothing.
#
# An event is the contract between a mechanism, which draws noise, and the accountant (accounting.py), which
# prices it. The set is closed: the accountant raises on anything else. A release without its event does not exist
# (``Release``). Events are written to the ledger by ``event_document`` and read back strictly by
# ``event_from_document``.
#
# Reference: the split into events and accountants is that of Google's dp_accounting.


# No sensible mechanism is outside; inside, squares and sums stay clear of overflow.
_SMALLEST, _LARGEST = 1e-20, 1e20


def _require_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _SMALLEST <= value <= _LARGEST:
        raise ValueError(f"{name} must be a number from {_SMALLEST:g} to {_LARGEST:g}")


def _require_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1")


def _require_scales(name: str, scales: tuple[tuple[float, int], ...]) -> None:
    if not scales:
        raise ValueError(f"{name} must not be empty")
    for scale, n_coordinates in scales:
        _require_positive("scale", scale)
        _require_count("number of coordinates", n_coordinates)


def _require_name(name: str, value: str) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= 400 or not value.isprintable():
        raise ValueError(f"a {name} has a name of up to 400 printable characters")


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    **dict.fromkeys(("noise_multiplier", "epsilon", "rho"), _require_positive),
    **dict.fromkeys(("grid_bits", "n_shares", "n_values", "shift", "n_coordinates", "count"), _require_count),
    "scales": _require_scales,
    "mechanism": _require_name,
}
"""What the fields of all events must hold, by their names."""


class _Checked:
    __slots__ = ()

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            if hasattr(self, name):
                check(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class GaussianEvent(_Checked):
    """A query plus continuous Gaussian noise N(0, s^2 I), with s = ``noise_multiplier`` times the L2 sensitivity."""

    noise_multiplier: float
    relation: NeighbouringRelation


@dataclass(frozen=True, slots=True)
class DiscreteGaussianEvent(_Checked):
    """An integer query plus, in each coordinate, the sum of ``n_shares`` independent discrete Gaussians.

    P(share = y) is proportional to exp(-y^2 / (2 s^2)) on the integers.

    Attributes:
        noise_multiplier: least standard deviation of the summed noise divided by the L2 sensitivity, where both are
            measured after scaling each coordinate by its weight.
        relation: what neighbouring data sets differ in.
        scales: pairs (s, number of coordinates): the parameter s of one share in grid units, and how many coordinates
            of the query have it.
        n_shares: shares that an adversary does not know: 1 for a trusted aggregator, sites minus colluders otherwise.
    """

    noise_multiplier: float
    relation: NeighbouringRelation
    scales: tuple[tuple[float, int], ...]
    n_shares: int = 1


@dataclass(frozen=True, slots=True)
class LaplaceEvent(_Checked):
    """An integer query plus discrete Laplace noise in each coordinate: likelihood ratios stay below exp(epsilon)."""

    epsilon: float
    relation: NeighbouringRelation


@dataclass(frozen=True, slots=True)
class DiscreteLaplaceEvent(_Checked):
    """An integer query plus, in each coordinate, a sum of shares that is exactly discrete Laplace.

    P(sum = y) is proportional to exp(-|y| / b) on the integers. A share is the difference of two negative binomials of
    order 1 / ``n_shares``; one share is the whole noise.

    Attributes:
        epsilon: likelihood ratios of the whole query stay below exp(epsilon).
        relation: what neighbouring data sets differ in.
        scales: pairs (b, number of coordinates): the parameter of the summed noise in grid units, and how many
            coordinates of the query have it.
        grid_bits: the grid's unit is 2^-grid_bits of the rows' units; rows were rounded onto it before they were added.
        n_shares: shares that an adversary does not know: 1 for a trusted aggregator, sites minus colluders otherwise.
    """

    epsilon: float
    relation: NeighbouringRelation
    scales: tuple[tuple[float, int], ...]
    grid_bits: int
    n_shares: int = 1


@dataclass(frozen=True, slots=True)
class IntegerNoiseEvent(_Checked):
    """An integer query plus noise of a mechanism that others wrote, whose price was derived from its mass function.

    Attributes:
        epsilon: the derived price: likelihood ratios of the whole query stay below exp(epsilon).
        relation: what neighbouring data sets differ in.
        mechanism: its name, distribution, version and the hash of its files.
        shift: by how much neighbouring queries differ at most, absolute values added up. Units: steps of the query.
        n_coordinates: in how many of its numbers they differ at most.
    """

    epsilon: float
    relation: NeighbouringRelation
    mechanism: str
    shift: int
    n_coordinates: int


@dataclass(frozen=True, slots=True)
class ExponentialEvent(_Checked):
    """One of n candidates drawn with probability proportional to exp(epsilon * utility / (2 * sensitivity))."""

    epsilon: float
    relation: NeighbouringRelation


@dataclass(frozen=True, slots=True)
class LocalRandomisedResponseEvent(_Checked):
    """Each value of a row replaced on its own by randomised response over its buckets.

    Attributes:
        epsilon: per value; this alone is the guarantee at the element level (CHANGE_VALUE).
        n_values: values of one row that are randomised: a whole row costs ``n_values * epsilon``.
        relation: CHANGE_VALUE prices one value; every other relation prices the whole row.
    """

    epsilon: float
    n_values: int
    relation: NeighbouringRelation


@dataclass(frozen=True, slots=True)
class ConcentratedEvent(_Checked):
    """A mechanism of which no more is known than its Renyi divergence of order a: at most rho * a, for all a > 1.

    For mechanisms that have nothing tighter, say a discrete Gaussian on a grid too coarse for the exact bound.
    Reference: Bun and Steinke, Concentrated Differential Privacy (zCDP).
    """

    rho: float
    relation: NeighbouringRelation


SimpleEvent = (
    GaussianEvent
    | DiscreteGaussianEvent
    | LaplaceEvent
    | DiscreteLaplaceEvent
    | IntegerNoiseEvent
    | ExponentialEvent
    | LocalRandomisedResponseEvent
    | ConcentratedEvent
)


@dataclass(frozen=True, slots=True)
class DisjointPartEvent:
    """A mechanism that uses only the rows of one part of a partition; parts of the same partition run in parallel.

    A row is in one part only, so a partition costs as much as its costliest part. This holds if each row is assigned
    on its own (by a keyed hash of its id, say) and never by fixed sizes of parts, which depend on the other rows.

    Attributes:
        event: what was run on the part; a simple event.
        partition: name of the partition within its job, for instance "ensemble 3"; another assignment of the rows is
            another partition and needs another name.
        part: number of the part in it.

    Raises:
        ValueError: the relation is REPLACE_ROW, under which a row may leave one part and enter another.
    Reference: dp_components/README.md, section 8.
    """

    event: SimpleEvent
    partition: str
    part: int

    def __post_init__(self) -> None:
        if isinstance(self.part, bool) or not isinstance(self.part, int) or self.part < 0:
            raise ValueError("part must be a whole number of at least 0")
        if isinstance(self.event, DisjointPartEvent | RepeatedEvent | ComposedEvent):
            raise ValueError("a part holds one simple event: repeat or compose the parts instead")
        if not isinstance(self.partition, str) or not 0 < len(self.partition) <= 100:
            raise ValueError("a partition has a name of up to 100 characters")
        if self.event.relation is NeighbouringRelation.REPLACE_ROW:
            raise ValueError("under replace_row a row may change its part: parts then cost their sum")

    @property
    def relation(self) -> NeighbouringRelation:
        """The relation of the event."""
        return self.event.relation


@dataclass(frozen=True, slots=True)
class RepeatedEvent(_Checked):
    """``count`` runs of the same mechanism, each with noise of its own, chosen adaptively."""

    event: Event
    count: int


@dataclass(frozen=True, slots=True)
class ComposedEvent:
    """Several mechanisms on the same rows, chosen adaptively; an empty tuple is no release at all."""

    events: tuple[Event, ...]


PricedEvent = SimpleEvent | DisjointPartEvent
"""What a ledger counts and a relation belongs to."""

Event = PricedEvent | RepeatedEvent | ComposedEvent
"""What a plan or a release may be made of."""

_NAMES: dict[str, type[SimpleEvent]] = {
    "gaussian": GaussianEvent,
    "discrete_gaussian": DiscreteGaussianEvent,
    "laplace": LaplaceEvent,
    "discrete_laplace": DiscreteLaplaceEvent,
    "integer_noise": IntegerNoiseEvent,
    "exponential": ExponentialEvent,
    "local_randomised_response": LocalRandomisedResponseEvent,
    "concentrated": ConcentratedEvent,
}
_KINDS = {kind: name for name, kind in _NAMES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Release:
    """Noised data together with the event that pays for them.

    Shapes: value: int64[...], in grid units, bucket ids or the index of a candidate, as the mechanism says.
    """

    value: NDArray[np.int64]
    event: Event


def simple_events(event: Event) -> Iterator[tuple[PricedEvent, int]]:
    """Yield the simple events (and parts) of a composition with their counts.

    Raises:
        UnknownEvent: something in it is not an event of this module.
    """
    match event:
        case RepeatedEvent(event=inner, count=count):
            for simple, times in simple_events(inner):
                yield simple, times * count
        case ComposedEvent(events=parts):
            for part in parts:
                yield from simple_events(part)
        case DisjointPartEvent(event=inner) if type(inner) in _KINDS:
            yield event, 1
        case _ if type(event) in _KINDS:
            yield event, 1
        case _:
            raise UnknownEvent(f"{type(event).__name__} is not a known privacy event.")


def event_document(event: PricedEvent) -> dict[str, object]:
    """Return a simple event or a part as JSON values.

    Raises:
        UnknownEvent: it is not a simple event of this module.
    """
    if isinstance(event, DisjointPartEvent):
        return {**event_document(event.event), "partition": event.partition, "part": event.part}
    if type(event) not in _KINDS:
        raise UnknownEvent(f"{type(event).__name__} is not a simple privacy event.")
    document: dict[str, object] = {"event": _KINDS[type(event)]}
    for field in fields(event):
        value = getattr(event, field.name)
        if isinstance(value, NeighbouringRelation):
            value = value.value
        elif field.name == "scales":
            value = [list(pair) for pair in value]
        document[field.name] = value
    return document


def event_from_document(document: Mapping[str, object]) -> PricedEvent:
    """Read what ``event_document`` writes, and nothing else.

    Raises:
        UnknownEvent: the event is not known.
        ValueError: a field is missing, superfluous or impossible.
    """
    values = dict(document)
    if "partition" in values:
        partition, part = values.pop("partition"), values.pop("part", None)
        return DisjointPartEvent(event_from_document(values), partition, part)  # type: ignore[arg-type]
    kind = _NAMES.get(str(values.pop("event", None)))
    if kind is None:
        raise UnknownEvent("an unknown privacy event")
    if set(values) != {field.name for field in fields(kind)}:
        raise ValueError("an event with other fields than it has")
    values["relation"] = NeighbouringRelation(values["relation"])
    if "scales" in values:
        values["scales"] = _scales(values["scales"])
    return kind(**values)  # type: ignore[arg-type]  # the constructor checks the values


def _scales(value: object) -> tuple[tuple[float, int], ...]:
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise ValueError("scales must be pairs")
    return tuple((scale, count) for scale, count in value)
