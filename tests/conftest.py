"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# A test is red because something is wrong, not because the machine is busy or the dice fell so: times are no property
# here, and the examples are the same in every run. HYPOTHESIS_PROFILE=explore draws others each time.
_SLOW_MACHINES = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **_SLOW_MACHINES)
settings.register_profile("explore", **_SLOW_MACHINES)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
