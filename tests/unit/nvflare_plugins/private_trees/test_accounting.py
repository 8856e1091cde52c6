"""What each shipped preset costs and how many events it is made of: fixed, so that no change of code changes them."""

from __future__ import annotations

import pytest

from dp_components.accounting import compose, count_events
from nvflare_plugins.kinds.private_trees.job import JobPlan
from nvflare_plugins.kinds.private_trees.methods import PRESETS
from tests.support.private_federation import job_of

COSTS = {
    "default": (0.9999933749038058, 9.998998339703244e-06, 301, 301),
    "default_2026_12": (0.9999933749038058, 9.998998339703244e-06, 301, 301),
    "default_2026_11": (0.9999933749038156, 9.998998339704943e-06, 201, 201),
    "few_rounds": (0.9999933749038095, 9.998998339704086e-06, 241, 25),
    "pure": (0.99999999, 0.0, 80, 80),
    "pure_2026_11": (0.99999999, 0.0, 80, 80),
    "dp_rf": (0.9999933749037997, 9.998998339702721e-06, 200, 1),
    "dp_tr_newton": (0.9999933749037995, 9.998998339702577e-06, 200, 200),
    "dp_tr_newton_ih": (0.9999933749038099, 9.99899833970425e-06, 125, 105),
    "dp_tr_newton_ih_ebm": (0.9999933749038099, 9.99899833970425e-06, 125, 125),
    "dp_ebm": (0.9999933749037996, 9.9989983397024e-06, 500, 500),
    "dp_ebm_newton": (0.9999933749038029, 9.99899833970279e-06, 100, 100),
    "dp_gbm": (0.9999933749037996, 9.9989983397024e-06, 500, 100),
    "feverless": (0.9999933749037996, 9.9989983397024e-06, 500, 100),
    "batch_ih_ebm_25": (0.9999933749038099, 9.99899833970425e-06, 125, 29),
    "batch_ih_ebm_100": (0.9999933749038099, 9.99899833970425e-06, 125, 26),
}
"""Preset -> (epsilon, delta, queries, messages) of a job of epsilon 1, delta 1e-5, on five features at three sites.

A pure one has no delta.
"""


@pytest.mark.parametrize("preset", PRESETS)
def test_the_accounting_of_every_preset_stays(preset: str) -> None:
    """Equal to the last digit where it was written; another libm may round the root of epsilon otherwise."""
    job = job_of(method=preset, components={})
    events = JobPlan.of(job, 3).releases.events
    cost = compose(events)
    found = (cost.epsilon(job.at_delta), cost.delta(job.epsilon), sum(count_events(events).values()), len(events))
    assert found == pytest.approx(COSTS[preset], rel=1e-13)
