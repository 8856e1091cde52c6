"""Which protocols of each kind of job this release speaks: sites of different releases agree on one of them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import NamedTuple

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import PolicyRefusal

MOST = (1 << 16) - 1


class Span(NamedTuple):
    """A range of protocols, both ends included; numbers begin with 1."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least} to {self.most}"


PROTOCOLS: dict[str, Span] = {
    "alignment": Span(1, 1),
    "bagging": Span(1, 1),
    "dpboost": Span(1, 1),
    "federboost_vertical": Span(1, 1),
    "horizontal": Span(1, 1),
    "private_trees": Span(1, 1),
    "profile": Span(1, 1),
    "selection": Span(1, 1),
    "tuning": Span(1, 1),
    "vertical": Span(1, 1),
    "vertical_inference": Span(1, 1),
    "vertical_tuning": Span(1, 1),
}
"""Kind -> what this release speaks. A number rises when messages or arithmetic of its kind change, and only then:
tests/golden/test_golden_protocols.py notices. A release that still speaks the number before has both in its range."""


def spoken(kind: str, least_protocol: Mapping[str, int]) -> Span:
    """Return what a site speaks in jobs of a kind: the highest of its release, and lower ones that its policy names.

    Args:
        least_protocol: of the site's policy.

    Raises:
        ConfigurationError: this release knows no such kind.
        PolicyRefusal: the policy asks for more than this release speaks.
    """
    if kind not in PROTOCOLS:
        raise ConfigurationError(
            f"no protocol of {kind} jobs is known here: site/protocols.py lists those of each kind"
        )
    own = PROTOCOLS[kind]
    least = least_protocol.get(kind, own.most)
    if least > own.most:
        raise PolicyRefusal(
            f"this site takes part in {kind} jobs by protocol {least} or higher, and VeilBoost {version('veilboost')} "
            f"speaks {own}. Policy key: least_protocol.{kind}. Remedy: update VeilBoost here, or lower the number"
        )
    return Span(max(least, own.least), own.most)
