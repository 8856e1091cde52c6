"""Errors of jobs and policies beside those of ``he_processors.errors``; what is said there of messages holds here."""

from __future__ import annotations

from he_processors.errors import VeilBoostError


class PolicyRefusal(VeilBoostError):
    """A site's own policy forbids what the job asks for: change the job, or ask that site."""


class JobAborted(VeilBoostError):
    """The job was ended from outside: by an operator, a peer's failure or a deadline."""
