"""What vertical training does not support is refused by name, before anything is sent."""

from __future__ import annotations

import numpy as np
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.growth.arithmetic import TreeParameters
from nvflare_plugins.kinds.vertical.job import check_vertical_parameters

NAMES = ["a", "b", "c"]
REFUSED = {
    "booster": ["dart", "gblinear"],
    "tree_method": ["approx", "exact", "gpu_hist"],
    "device": ["cuda", "cuda:0", "gpu"],
    "multi_strategy": ["multi_output_tree"],
    "sampling_method": ["gradient_based"],
    "process_type": ["update"],
    "updater": ["refresh"],
    "debug_synchronize": [True],
    "feature_weights": [[1, 2, 3]],
    "base_margin": [0.5],
    "enable_categorical": [True],
    "feature_types": [["c", "q", "q"]],
    "seed_per_iteration": [True],
    "objective": ["survival:cox", "survival:aft", "reg:linear", "unknown"],
    "quantile_alpha": [[0.2, 0.8]],
    "no_such_parameter": [1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_refused_by_name(name, value):
    params = {"objective": "reg:quantileerror" if name == "quantile_alpha" else "binary:logistic", name: value}
    with pytest.raises(ConfigurationError, match=name if name != "objective" else str(value).split(":")[0]):
        check_vertical_parameters(params, NAMES)


def test_effective_parameters_are_those_of_xgboost():
    checked = check_vertical_parameters({"objective": "count:poisson", "lambda": 0.1, "eta": 0.5}, NAMES)
    params = TreeParameters.from_effective(checked.effective)
    assert params.max_delta_step == np.float32(0.7)  # XGBoost sets it by itself for this objective
    assert params.reg_lambda == np.float32(0.1) and not params.lossguide and params.interactions is None


def test_constraints_by_name():
    checked = check_vertical_parameters(
        {"monotone_constraints": {"b": -1}, "interaction_constraints": [["a", "c"]], "grow_policy": "lossguide"}, NAMES
    )
    params = TreeParameters.from_effective(checked.effective)
    assert params.monotone == (0, -1, 0) and params.interactions == (frozenset({0, 2}),) and params.lossguide
