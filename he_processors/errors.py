"""Errors of this package, and the root of all of VeilBoost's, named by what the operator should do about them.

A message may hold sizes, names of parameters, kinds and key fingerprints. It never holds a key, a seed, a
plaintext, a gradient, a row id or a feature value: FLARE streams error logs to the server.
"""

from __future__ import annotations


class VeilBoostError(Exception):
    """Root of all errors of this project."""


class ConfigurationError(VeilBoostError):
    """The job or the site's own configuration is wrong or unsupported: correct it and submit again."""


class ProtocolError(VeilBoostError):
    """Bytes from a peer (or from XGBoost) are not what the protocol allows at this point."""


class CapacityExceeded(VeilBoostError):
    """A value does not fit the number format agreed for it; nothing was encoded or sent."""


class KeyMismatch(VeilBoostError):
    """Two objects belong to different keys."""


class AuthenticationError(VeilBoostError):
    """A signature, certificate, MAC or sealed message does not verify."""


class BackendUnavailable(VeilBoostError):
    """A backend that was asked for by name cannot run on this machine."""
