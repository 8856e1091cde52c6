"""Models that training shall go on from, as others may have written them: XGBoost would follow them beyond a tree."""

from __future__ import annotations

import copy
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.xgb.continuation import check_initial_model
from nvflare_plugins.xgb.model_json import trees_model
from nvflare_plugins.xgb.parameters import check_parameters
from tests.support.scoring import in_form_of

NAMES = ["a", "b", "c"]
PARAMS = {"objective": "binary:logistic", "max_depth": 3}


def trained(**params: Any) -> dict[str, Any]:
    values = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    matrix = xgb.DMatrix(values, label=values[:, 0] * values[:, 1] > 0, feature_names=NAMES)
    document: dict[str, Any] = json.loads(bytes(xgb.train({**PARAMS, **params}, matrix, 2).save_raw("json")))
    return document


def _cycle(tree: dict[str, Any], model: dict[str, Any]) -> None:
    inner = [node for node, left in enumerate(tree["left_children"]) if left > 0]
    tree["left_children"][inner[1]] = 0


def _of(field: str, value: object) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(tree: dict[str, Any], model: dict[str, Any]) -> None:
        tree[field][0] = value

    return change


def _output(tree: dict[str, Any], model: dict[str, Any]) -> None:
    model["tree_info"] = [5, 5]


def _rounds(tree: dict[str, Any], model: dict[str, Any]) -> None:
    model["iteration_indptr"] = [0, 100, 2]


DAMAGE: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "circle": _cycle,
    "own child": _of("left_children", 0),
    "child beyond the tree": _of("left_children", 10**6),
    "column beyond the row": _of("split_indices", 10**6),
    "threshold that is no number": _of("split_conditions", float("nan")),
    "output beyond the answer": _output,
    "rounds beyond the trees": _rounds,
}


def damaged(damage: str) -> bytes:
    document = copy.deepcopy(trained())
    model = trees_model(document["learner"])
    DAMAGE[damage](model["trees"][0], model)
    return json.dumps(document).encode()


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_trees_are_refused_before_training(damage: str) -> None:
    with pytest.raises(ConfigurationError, match=r"'m\.json' holds a tree that is none"):
        check_initial_model(damaged(damage), "m.json", check_parameters(PARAMS, NAMES), NAMES)


DROPPED = {"booster": "dart", "rate_drop": 0.9, "one_drop": 1}


@pytest.mark.parametrize("params", [{}, {"booster": "dart"}, DROPPED, {"num_parallel_tree": 2}])
def test_whole_models_are_taken(params: dict[str, Any]) -> None:
    parameters = check_parameters({**PARAMS, **params}, NAMES)
    check_initial_model(json.dumps(trained(**params)).encode(), "m.json", parameters, NAMES)


def test_trees_that_were_dropped_are_not_taken_for_others() -> None:
    with pytest.raises(ConfigurationError, match="has booster dart, the job gbtree"):
        model = json.dumps(trained(**DROPPED)).encode()
        check_initial_model(model, "m.json", check_parameters(PARAMS, NAMES), NAMES)


@pytest.mark.parametrize("form", ["3.2", "3.3", "3.4"])
def test_weights_of_trees_are_never_overlooked(form: str) -> None:
    """XGBoost takes all weights for 1, without a word, where a later release than itself has written them."""
    model = json.dumps(in_form_of(form, trained(**DROPPED))).encode()
    for params in ({}, DROPPED):
        try:
            check_initial_model(model, "m.json", check_parameters({**PARAMS, **params}, NAMES), NAMES)
        except ConfigurationError as error:
            assert re.search("has booster dart, the job gbtree|weighs its trees in a form that XGBoost", str(error))
        else:
            assert params == DROPPED and form <= xgb.__version__


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["circle", "child beyond the tree", "output beyond the answer"])
def test_without_the_check_the_process_would_die(damage: str, tmp_path: Path) -> None:
    """The control: stock XGBoost takes such a model, and training from it ends the process."""
    (tmp_path / "m.json").write_bytes(damaged(damage))
    program = """import sys, numpy as np, xgboost as xgb
matrix = xgb.DMatrix(np.ones((300, 3)), label=np.ones(300), feature_names=["a", "b", "c"])
booster = xgb.Booster({"objective": "binary:logistic"}, [matrix], model_file=sys.argv[1])
booster.update(matrix, 2)
booster.predict(matrix)
"""
    run = subprocess.run([sys.executable, "-c", program, tmp_path / "m.json"], capture_output=True, check=False)
    assert -run.returncode in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
