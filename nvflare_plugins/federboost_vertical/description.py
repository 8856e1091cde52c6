"""What a passive party says in public about its features: written by the party, kept in its input folder.

    {"age": {"low": 18, "high": 100}, "sex": {"values": [1, 2]}, "income": {"edges": [20000, 40000, 80000]}}

Only the features named here are used. "low" and "high" bound a feature, "values" lists all values of a discrete one,
"edges" gives the ends of the buckets themselves. Nothing of it may be looked up in the rows: it is not paid for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dp_components.bucket_ldp.edges import Feature, PublicEdges, PublicValues
from dp_components.split_candidates.candidates import FeatureBounds
from he_processors.errors import ConfigurationError

_REMEDY = "Give each feature low and high, or values, or edges, from public knowledge and never from the rows."


@dataclass(frozen=True, slots=True)
class Description:
    """The features of one passive party, in the order of its file."""

    names: tuple[str, ...]
    features: tuple[Feature, ...]

    @classmethod
    def read(cls, path: Path) -> Description:
        """Read the party's file.

        Raises:
            ConfigurationError: it is not a description; the message names the feature.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            raise ConfigurationError(f"{path.name}: the description of the features is no JSON file") from None
        if not isinstance(document, dict) or not document:
            raise ConfigurationError(f"{path.name} describes no feature. {_REMEDY}")
        return cls(tuple(document), tuple(_feature(name, item) for name, item in document.items()))


def _feature(name: str, item: object) -> Feature:
    complaint = ConfigurationError(f"feature {name[:80]!r} has no usable public description. {_REMEDY}")
    if not isinstance(item, Mapping):
        raise complaint
    try:
        match item:
            case {"low": low, "high": high, **rest} if not rest:
                return FeatureBounds(*_numbers([low, high]).tolist())
            case {"values": list(values), **rest} if not rest:
                return PublicValues(tuple(_numbers(values).tolist()))
            case {"edges": list(edges), **rest} if not rest:
                return PublicEdges(tuple(_numbers(edges).tolist()))
    except (ValueError, OverflowError):
        raise complaint from None
    raise complaint


def _numbers(values: Sequence[object]) -> NDArray[np.float64]:
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        raise ValueError("not numbers")
    return np.array(values, dtype=np.float64)
