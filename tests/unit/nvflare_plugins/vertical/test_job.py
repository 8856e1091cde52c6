"""What a vertical job may say."""

from __future__ import annotations

import numpy as np
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.growth.arithmetic import TreeParameters
from nvflare_plugins.kinds.vertical.job import VerticalJob, check_vertical_parameters
from nvflare_plugins.kinds.vertical_tuning.job import VerticalTuningJob
from nvflare_plugins.recipes.recipe import VerticalXGBRecipe

LEAST = {"active": "a", "data_set": "d", "label": "y"}


def test_defaults_are_the_safe_ones():
    job = VerticalJob.from_dict(LEAST)
    assert (job.profile, job.preset, job.key_bits, job.tracking) == ("paillier", "guarded", 3072, False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"active": ""}, "active"),
        ({"label": None}, "label"),
        ({"profile": "masks"}, "masks"),
        ({"preset": "none"}, "preset"),
        ({"num_rounds": 0}, "num_rounds"),
        ({"num_rounds": True}, "num_rounds"),
        ({"key_bits": 1024}, "key_bits"),
        ({"own_rounds": -1}, "own_rounds"),
        ({"features": {"a": "x"}}, "features"),
        ({"features": ["x"]}, "features"),
        ({"categories": {"x": ["a"]}}, "categories"),
        ({"categories": {"site-2": {"x": []}}}, "categories"),
        ({"categories": {"site-2": {"x": list(range(65536))}}}, "65535: put rare ones together"),
        ({"unknown_category_is_missing": 1}, "unknown_category_is_missing"),
        ({"base_margin": "m"}, "base_margin is refused"),
        ({"early_stopping_rounds": 3}, "eval_data_set"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"deadline_s": True}, "deadline_s"),
        ({"params": {1: 2}}, "params"),
        ({"label_classes": [1.5]}, "label_classes"),
        ({"alignment": ""}, "alignment"),
        ({"fraction_bits": 14}, "profile elgamal"),
        ({"epsilon": 1.0, "delta": 1e-6}, "epsilon and delta are options of preset noised"),
        ({"preset": "exact", "epsilon": 1.0}, "epsilon and delta are options of preset noised"),
        ({"noised_features": 4}, "options of preset noised"),
        ({"preset": "exact", "noised_bins": 8}, "options of preset noised"),
        ({"profile": "elgamal", "fraction_bits": 21}, "fraction_bits"),
        ({"profile": "elgamal", "fraction_bits": 14}, "write 20"),
        ({"point_bytes": 32}, "profile elgamal"),
        ({"profile": "elgamal", "point_bytes": 33}, "point_bytes"),
        ({"profile": "elgamal", "fraction_bits": True}, "fraction_bits"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_values_are_named(changes, said):
    with pytest.raises(ConfigurationError, match=said):
        VerticalJob.from_dict({**LEAST, **changes})


def test_recipes_refuse_what_no_party_would_accept():
    with pytest.raises(ConfigurationError, match="dart"):
        VerticalXGBRecipe("x", **LEAST, params={"booster": "dart"})
    with pytest.raises(ConfigurationError, match="not among the sites"):
        VerticalXGBRecipe("x", **LEAST, sites=["b", "c"])
    recipe = VerticalXGBRecipe("x", **LEAST, params={"monotone_constraints": {"b.f0": 1}}, sites=["b", "a"])
    assert recipe.sites == ["a", "b"] and recipe.min_clients == 2


@pytest.mark.parametrize(
    ("changes", "key_length", "strength", "sums_per_set", "is_exact"),
    [
        ({}, 3072, 128, 2, True),
        ({"key_bits": 2048}, 2048, 112, 2, True),
        ({"profile": "elgamal", "key_bits": 2048}, None, 128, 4, True),
        ({"profile": "elgamal", "fraction_bits": 20, "point_bytes": 32}, None, 128, 2, False),
        ({"profile": "plain"}, None, 0, 2, True),
    ],
)
def test_what_a_profile_means(changes, key_length, strength, sums_per_set, is_exact):
    job = VerticalJob.from_dict({**LEAST, **changes})
    assert (job.key_length, job.strength, job.sums_per_set, job.is_exact) == (
        key_length,
        strength,
        sums_per_set,
        is_exact,
    )


@pytest.mark.parametrize(("kind", "more"), [(VerticalJob, {}), (VerticalTuningJob, {"trials": [{"max_depth": 3}]})])
def test_a_profile_that_was_removed_is_refused_with_what_does_its_work(kind, more):
    with pytest.raises(ConfigurationError, match=r"okamoto_uchiyama was removed\. Remedy: profile=elgamal"):
        kind.from_dict({**LEAST, **more, "profile": "okamoto_uchiyama"})
    with pytest.raises(ConfigurationError, match="choose one of paillier, elgamal, plain"):
        kind.from_dict({**LEAST, **more, "profile": "unheard"})


# -- parameters of training --------------------------------------------------------------------------------------------


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
