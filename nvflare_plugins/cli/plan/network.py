"""The network that a plan assumes."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from he_processors.errors import ConfigurationError

_BYTES_PER_MBIT = 125_000


@dataclass(frozen=True, slots=True)
class Network:
    """Units: seconds per rendezvous of empty messages; bytes per second of a site's and of the server's link."""

    latency_s: float = 0.010
    site_bytes_per_s: float = 12.5e6
    server_bytes_per_s: float = 12.5e6

    def exchange_s(self, size: int, n_sites: int) -> float:
        """Return the time of one exchange: every site sends ``size`` bytes, then every site receives as many."""
        one_way = max(size / self.site_bytes_per_s, n_sites * size / self.server_bytes_per_s)
        return self.latency_s + 2 * one_way

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Network:
        """Return what the command line says. Raises: ConfigurationError."""
        server = arguments.server_bandwidth_mbit or arguments.bandwidth_mbit
        if not all(0 < value < math.inf for value in (arguments.latency_ms, arguments.bandwidth_mbit, server)):
            raise ConfigurationError("latency and bandwidth must be numbers above 0")
        return cls(arguments.latency_ms / 1000, arguments.bandwidth_mbit * _BYTES_PER_MBIT, server * _BYTES_PER_MBIT)
