"""XGBoost's model document, with the public lists that give it meaning.

A model trained on positions in public lists says nothing of the lists by itself: a frame whose categories stand in
another order would be scored silently wrong. XGBoost 3.1 and later keep the categories of the training frame in the
model and turn the codes of another frame into those of training. VeilBoost's models carry the job's lists in that form,
and once more as attributes, in words, with the classes of the label.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xgboost as xgb

from he_processors.errors import ConfigurationError

CATEGORIES_ATTRIBUTE = "veilboost_categories"
CLASSES_ATTRIBUTE = "veilboost_label_classes"
PARTS_ATTRIBUTE = "veilboost_trained_by"
"""In a model of a job that went on without a site: which sites trained from which round on (horizontal/going_on.py)."""
LEAST_XGBOOST_ATTRIBUTE, LEAST_XGBOOST = "veilboost_least_xgboost", "3.1"
"""In every finished model: the first release that reads it. Earlier ones drop the list of base scores, and predict
wrongly without an error; they look at no attribute."""
COVERS_ATTRIBUTE = "veilboost_covers"
"""In a model whose covers (``sum_hessian``) are not those of rows."""
COVERS_NOTE = "noised, or not shared and so one small number for each leaf: SHAP values weigh by no training rows"
LEAST_COVER = np.float32(1e-6)
PART_ATTRIBUTE = "veilboost_part"
"""In a model that loads as an ordinary one and is not: thresholds of other parties are zero in it."""
PART_NOTE = "thresholds of other parties are 0.0 here: predictions are wrong, and so are SHAP values"
_WEIGHTS = "weight_drop"
_INT64 = 15  # XGBoost's name for an array of such numbers
NO_LISTS: dict[str, list[int]] = {"enc": [], "feature_segments": [], "sorted_idx": []}
"""XGBoost's form of no lists at all."""

Lists = Mapping[str, Sequence[str | int]]


def model_bytes(document: Mapping[str, Any]) -> bytes:
    """Return a model document as XGBoost reads it.

    XGBoost takes the escapes that JSON allows for characters beyond ASCII for six characters of text, so that a column
    named Größe would change its name: they are written as UTF-8.
    """
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def with_lists(
    model: bytes, feature_names: Sequence[str], categories: Lists, label_classes: Sequence[str | int] | None
) -> bytes:
    """Return a model that carries the public lists it was trained with; as it is if there are none.

    Stock XGBoost then reads a frame with categorical columns by their words, in whatever order they stand. Lists with
    characters beyond ASCII are the exception: XGBoost 3.2 measures words in characters and stores bytes, and would
    mistake one for another. Such a column is written as one of numbers, so that a frame with words is refused there;
    positions in the list are read as ever.

    Args:
        model: in XGBoost's JSON form, trained on positions in the lists.
        feature_names: all columns, in order.
        categories: column -> its public list.
        label_classes: the label's public list, in the order of the model's outputs.

    Privacy: the lists stand in the job, which all sites and the server know.
    """
    if not categories and label_classes is None:
        return model
    document = json.loads(model)
    learner = document["learner"]
    attributes = learner.setdefault("attributes", {})
    if label_classes is not None:
        attributes[CLASSES_ATTRIBUTE] = _words(list(label_classes))
    if categories:
        attributes[CATEGORIES_ATTRIBUTE] = _words({name: list(categories[name]) for name in sorted(categories)})
        trees_model(learner)["cats"] = _container([categories.get(name, ()) for name in feature_names])
    return model_bytes(document)


def finished(
    model: bytes, feature_names: Sequence[str], categories: Lists, label_classes: Sequence[str | int] | None
) -> bytes:
    """Return a trained model as a job leaves it: ``with_lists``, and the release of XGBoost that it needs."""
    listed = with_lists(model, feature_names, categories, label_classes)
    return with_attribute(listed, LEAST_XGBOOST_ATTRIBUTE, LEAST_XGBOOST)


def with_positive_covers(model: bytes) -> bytes:
    """Return a model of which every leaf has some cover, and every inner node the sum of its children's.

    Programs that explain trees divide by covers, and fail or go wrong over noised and absent ones. Nothing that
    predicts is changed; an attribute says that these covers are not those of rows.

    Privacy: post-processing of the model.
    """
    document = json.loads(model)
    for tree in trees_model(document["learner"])["trees"]:
        left, right = tree["left_children"], tree["right_children"]
        cover = np.fmax(np.asarray(tree["sum_hessian"], dtype=np.float32), LEAST_COVER)
        order = [0]  # each node before its children
        for node in order:
            order += [left[node], right[node]] if left[node] >= 0 else []
        for node in reversed(order):
            if left[node] >= 0:
                cover[node] = cover[left[node]] + cover[right[node]]
        tree["sum_hessian"] = [float(str(value)) for value in cover]
    document["learner"].setdefault("attributes", {})[COVERS_ATTRIBUTE] = COVERS_NOTE
    return model_bytes(document)


def categories_of(model: bytes) -> dict[str, tuple[str, ...]]:
    """Return the public lists that a model carries, by column. Raises: ValueError, TypeError: they are none."""
    listed = json.loads(json.loads(model)["learner"].get("attributes", {}).get(CATEGORIES_ATTRIBUTE, "{}"))
    return {str(name): tuple(map(str, words)) for name, words in listed.items()}


def declared_classes(attributes: Mapping[str, str], n_outputs: int) -> tuple[str | int, ...] | None:
    """Return the label's public list as a model carries it; None if it carries none.

    Raises:
        ValueError: it is not a list of so many different classes.
    """
    if CLASSES_ATTRIBUTE not in attributes:
        return None
    declared = json.loads(attributes[CLASSES_ATTRIBUTE])
    is_list = isinstance(declared, list) and all(type(one) in (str, int) for one in declared)
    if not is_list or len(set(map(str, declared))) != n_outputs or len(declared) != n_outputs:
        raise ValueError
    return tuple(declared)


def marked_as_part(model: bytes) -> bytes:
    """Return a party's copy of a vertical model with the note that it is not a whole one."""
    document = json.loads(model)
    document["learner"].setdefault("attributes", {})[PART_ATTRIBUTE] = PART_NOTE
    return model_bytes(document)


def with_attribute(model: bytes, name: str, value: str) -> bytes:
    """Return a model with a further attribute."""
    document = json.loads(model)
    document["learner"].setdefault("attributes", {})[name] = value
    return model_bytes(document)


def bare_model(document: Mapping[str, Any]) -> bytes:
    """Return a model that takes rows as numbers and positions in its lists, whatever its columns are called.

    Weights of trees get the form that every release reads; of a later one an earlier takes all for 1, without a word.
    """
    learner = document["learner"]
    model = {name: part for name, part in trees_model(learner).items() if name != _WEIGHTS}
    booster: dict[str, Any] = {"name": "gbtree", "model": {**model, "cats": NO_LISTS}}
    if weights := tree_weights(learner):
        booster = {"name": "dart", "gbtree": booster, _WEIGHTS: weights}
    learner = {**learner, "feature_names": [], "feature_types": [], "gradient_booster": booster}
    return model_bytes({**document, "learner": learner})


def without_lists(model: bytes) -> bytes:
    """Return a model that training can go on from.

    XGBoost compares its lists with those of the training matrix, which holds positions and has none. Models without
    lists come back as they are.
    """
    document = json.loads(bytes(xgb.Booster(model_file=bytearray(model)).save_raw("json")))
    learner = document["learner"]
    if not set(learner["attributes"]) & {CATEGORIES_ATTRIBUTE, CLASSES_ATTRIBUTE}:
        return model
    for name in (CATEGORIES_ATTRIBUTE, CLASSES_ATTRIBUTE):
        learner["attributes"].pop(name, None)
    trees_model(learner)["cats"] = NO_LISTS
    return model_bytes(document)


def check_lists(model: bytes, name: str, categories: Lists, label_classes: Sequence[str | int] | None) -> None:
    """Refuse a model whose lists are others than a job's. One that carries none is taken as it is.

    Raises:
        ConfigurationError: positions mean something else in it than in the job.
    """
    attributes = xgb.Booster(model_file=bytearray(model)).attributes()
    wanted = {
        CATEGORIES_ATTRIBUTE: _words({key: list(categories[key]) for key in sorted(categories)}),
        CLASSES_ATTRIBUTE: None if label_classes is None else _words(list(label_classes)),
    }
    for attribute, field in ((CATEGORIES_ATTRIBUTE, "categories"), (CLASSES_ATTRIBUTE, "label_classes")):
        if attribute in attributes and attributes[attribute] != wanted[attribute]:
            raise ConfigurationError(
                f"the model {name!r} was trained with other {field} than the job's: give the job the model's, which "
                f"stand in its attribute {attribute}"
            )


def check_names_survive(feature_names: Sequence[str], categories: Lists) -> None:
    """Have XGBoost read a model with these columns, before anything is released that would be lost with it.

    Raises:
        ConfigurationError: XGBoost does not give the names back, or does not read them.
    """
    names = list(feature_names)
    try:
        matrix = xgb.DMatrix(np.zeros((1, len(names)), dtype=np.float32), label=[0.0], feature_names=names)
        trial = bytes(xgb.train({"max_depth": 1, "nthread": 1, "base_score": 0.5}, matrix, 1).save_raw("json"))
        booster = xgb.Booster(model_file=bytearray(with_lists(trial, names, categories, None)))
        booster.predict(matrix)
        read = booster.feature_names
    except (ValueError, xgb.core.XGBoostError):
        read = None
    if read != names:
        raise ConfigurationError(
            "XGBoost cannot keep a model with these column names: rename columns that hold other than letters, digits, "
            "spaces and common signs"
        )


def _words(lists: object) -> str:
    return json.dumps(lists, ensure_ascii=False)


def trees_model(learner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a model document that holds the trees."""
    booster = learner["gradient_booster"]
    document: dict[str, Any] = booster.get("gbtree", booster)["model"]  # dart wraps its trees
    return document


def tree_weights(learner: Mapping[str, Any]) -> list[float] | None:
    """Return what the trees of a model count for after dropout; None if each counts once.

    They stand beside the trees up to XGBoost 3.3, and among them from 3.4.
    """
    weights: list[float] | None = learner["gradient_booster"].get(_WEIGHTS) or trees_model(learner).get(_WEIGHTS)
    return weights or None


def _container(of_feature: Sequence[Sequence[str | int]]) -> dict[str, Any]:
    """Return XGBoost's form of the lists: each with its order, so that it can search in them."""
    segments = np.cumsum([0, *map(len, of_feature)])
    order = [position for values in of_feature for position in _sorted_positions(values)]
    return {
        "enc": [_encoding(values) for values in of_feature],
        "feature_segments": segments.tolist(),
        "sorted_idx": order,
    }


def _encoding(values: Sequence[str | int]) -> dict[str, Any]:
    if values and not _are_ascii_words(values):
        return {"type": _INT64, "values": _numbers(values)}
    words = [str(value).encode() for value in values]
    offsets = np.cumsum([0, *map(len, words)]).tolist() if words else []
    return {"offsets": offsets, "values": list(b"".join(words))}


def _sorted_positions(values: Sequence[str | int]) -> list[int]:
    keys: Sequence[Any] = [str(value).encode() for value in values] if _are_ascii_words(values) else _numbers(values)
    return sorted(range(len(values)), key=keys.__getitem__)


def _are_ascii_words(values: Sequence[str | int]) -> bool:
    return not _are_integers(values) and all(str(value).isascii() for value in values)


def _are_integers(values: Sequence[str | int]) -> bool:
    limit = np.iinfo(np.int64)
    return bool(values) and all(type(value) is int and limit.min <= value <= limit.max for value in values)


def _numbers(values: Sequence[str | int]) -> list[int]:
    return [int(value) for value in values] if _are_integers(values) else list(range(len(values)))
