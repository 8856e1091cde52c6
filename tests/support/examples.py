"""How many examples a property is tried on: few in the quick suite, all with the slow tests."""

from __future__ import annotations

import os

_QUICK_SHARE = 4


def examples(n: int) -> int:
    """Return a quarter of ``n``, or ``n`` under HYPOTHESIS_PROFILE=thorough, as `make test-all` sets it."""
    return n if os.environ.get("HYPOTHESIS_PROFILE") in ("thorough", "explore") else max(n // _QUICK_SHARE, 10)
