"""What a bagging job may say."""

from __future__ import annotations

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.kinds.bagging.job import BaggingJob
from nvflare_plugins.recipes.recipe import BaggingXGBRecipe, HorizontalXGBRecipe, VerticalXGBRecipe

LEAST = {"data_set": "train", "label": "y"}


@pytest.mark.parametrize(
    "changes",
    [
        {"data_set": ""},
        {"label": 3},
        {"params": []},
        {"num_rounds": 0},
        {"num_rounds": 10**30},
        {"features": []},
        {"features": "a"},
        {"label_classes": []},
        {"deadline_s": -1},
        {"deadline_s": True},
        {"profile": "masks"},
        {"weight": "w"},
        {"x": 1},
    ],
    ids=repr,
)
def test_wrong_fields_are_refused(changes: dict) -> None:
    with pytest.raises(ConfigurationError):
        BaggingJob.from_dict({**LEAST, **changes})


@pytest.mark.parametrize("document", [{}, {"data_set": "train"}, [], None, "x"], ids=repr)
def test_what_is_no_job_is_refused(document: object) -> None:
    with pytest.raises(ConfigurationError):
        BaggingJob.from_dict(document)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"subsample": 0.5}, "subsample"),
        ({"num_parallel_tree": 2}, "num_parallel_tree"),
        ({"booster": "dart"}, "booster"),
        ({"max_depth": 13}, "max_depth"),
        ({"max_depth": 0, "max_leaves": 8}, "max_depth"),
        ({"objective": "multi:softprob", "num_class": 3}, "multi:softprob"),
        ({"objective": "count:poisson"}, "count:poisson"),
        ({"objective": "reg:absoluteerror"}, "reg:absoluteerror"),
        ({"maxdepth": 3}, "max_depth"),
        ({"scale_pos_weight": 2}, "scale_pos_weight"),
        ({"scale_pos_weight": 1e9, "monotone_constraints": {"Größe": 1}}, "scale_pos_weight"),
        ({"objective": "binary:logistic", "scale_pos_weight": 1e-9}, "scale_pos_weight"),
        ({"eval_metric": "nothing"}, "nothing"),
        ({"seed_per_iteration": True}, "seed_per_iteration"),
        ({"max_cat_to_onehot": 4}, "max_cat_to_onehot"),
        ({"max_cat_threshold": 64}, "max_cat_threshold"),
    ],
    ids=lambda part: str(part) if isinstance(part, dict) else "",
)
def test_parameters_that_no_site_would_take_are_refused_by_the_recipe(params: dict, word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        BaggingXGBRecipe("b", data_set="train", label="y", params=params)


def test_what_says_nothing_is_taken() -> None:
    params = {"objective": "binary:logistic", "scale_pos_weight": 1, "seed_per_iteration": False, "eval_metric": None}
    BaggingXGBRecipe("b", data_set="train", label="y", params=params)
    BaggingXGBRecipe("b", data_set="train", label="y", params={"monotone_constraints": {"Größe": 1}})


def test_parameters_of_examples_for_flare_are_taken_as_they_stand() -> None:
    """Of NVIDIA FLARE's own recipes and examples, for all three kinds of training."""
    params = {"max_depth": 8, "eta": 0.1, "objective": "binary:logistic", "eval_metric": "auc", "tree_method": "hist"}
    params |= {"nthread": 16}
    for recipe, more in (
        (BaggingXGBRecipe, {}),
        (HorizontalXGBRecipe, {}),
        (VerticalXGBRecipe, {"active": "site-1", "min_clients": 2}),
    ):
        recipe("example", data_set="train", label="y", params=params, **more)
    with_metric, without = (BaggingJob("train", "y", {**params, "eval_metric": m}) for m in ("auc", None))
    assert with_metric.parameters(["a"]).for_booster(1) == without.parameters(["a"]).for_booster(1)


def test_a_job_comes_back_from_its_document() -> None:
    job = BaggingJob.from_dict({**LEAST, "params": {"max_depth": 2}, "num_rounds": 3, "label_classes": ["a", "b"]})
    assert BaggingJob.from_dict(job.to_dict()) == job
    assert job.parameters(["a"]).agreed["base_score"] == 0.5
