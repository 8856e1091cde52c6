"""Errors of the privacy components, named by what the operator should do about them.

A message may hold budgets, counts, names of jobs and data sets. It never holds a row, a sum or a noise value.
"""

from __future__ import annotations


class PrivacyError(Exception):
    """Root of the errors of this package."""


class PrivacyRefusal(PrivacyError):
    """The privacy budget or the trust model forbids what was asked for; nothing was released."""


class JobIdTaken(PrivacyRefusal):
    """The ledger knows a job of this id, and takes no other one under it."""


class UnknownEvent(PrivacyError):
    """An event that the accountant does not know: it is never taken to cost nothing."""


class UnusableNoise(PrivacyError, ValueError):
    """A mechanism of others says of itself what no price follows from, or does something else: nothing was released."""


class SecondOpinionDiffers(PrivacyError):
    """The independent accountant disagrees, or cannot be asked: no job starts on figures that are in doubt."""


class LedgerDamaged(PrivacyError):
    """The ledger's file is not what the ledger writes: look at it before any further job."""
