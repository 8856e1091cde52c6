"""XGBoost's model document: its trees, what is checked of them, and the public lists that give it meaning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_components.split_candidates.candidates import Candidates
from dp_components.split_methods.tree import LEAF, Tree
from he_processors.errors import ConfigurationError
from nvflare_plugins.xgb import stock as xgb

# XGBoost's model document, with the public lists that give it meaning.
#
# A model trained on positions in public lists says nothing of the lists by itself: a frame whose categories stand in
# another order would be scored silently wrong. XGBoost 3.1 and later keep the categories of the training frame in the
# model and turn the codes of another frame into those of training. VeilBoost's models carry the job's lists in that
# form, and once more as attributes, in words, with the classes of the label.


CATEGORIES_ATTRIBUTE = "veilboost_categories"
CLASSES_ATTRIBUTE = "veilboost_label_classes"
PARTS_ATTRIBUTE = "veilboost_trained_by"
"""In a model of a job that went on without a site: which sites trained from which round on."""
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
    return with_attribute(model, PART_ATTRIBUTE, PART_NOTE)


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
    document = read_document(model)
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


def walked_leaves(tree: Mapping[str, Any]) -> list[int]:
    """Return the leaves of a tree in XGBoost's order of a walk: the right child first."""
    found, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        left, right = tree["left_children"][node], tree["right_children"][node]
        if left == -1:
            found.append(node)
        else:
            waiting += [left, right]
    return found


def read_document(model: bytes) -> dict[str, Any]:
    """Return the document of a model in either of XGBoost's formats. Raises: XGBoostError, ValueError: it is none."""
    document: dict[str, Any] = json.loads(bytes(xgb.Booster(model_file=bytearray(model)).save_raw("json")))
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


# Trees that are arrays as XGBoost's model document: for trees that XGBoost has not grown, or shall fill itself.


_NO_PARENT = 2**31 - 1
_XGBOOST_VERSION = [3, 2, 0]  # whose form these documents have, and later ones read


def tree_document(
    number: int,
    n_features: int,
    left: NDArray[np.integer[Any]],
    right: NDArray[np.integer[Any]],
    feature: NDArray[np.integer[Any]],
    conditions: Sequence[float],
    default_left: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the document of one tree over columns of numbers, without statistics: these are zero.

    Shapes: left, right, feature: int[n_nodes], the root first. A leaf has no child (-1), its feature does not count.

    Args:
        number: of the tree in its model.
        conditions: thresholds, which send x < threshold to the left, and the values of leaves.
        default_left: 1 where missing values go to the left; None sends them to the right.
    """
    n_nodes, is_leaf = left.size, left == LEAF
    zeros, parents = [0.0] * n_nodes, np.full(n_nodes, _NO_PARENT)
    for children in (left, right):
        parents[children[~is_leaf]] = np.flatnonzero(~is_leaf)
    return {
        "base_weights": zeros,
        "categories": [],
        "categories_nodes": [],
        "categories_segments": [],
        "categories_sizes": [],
        "default_left": [0] * n_nodes if default_left is None else list(default_left),
        "id": number,
        "left_children": left.tolist(),
        "loss_changes": zeros,
        "parents": parents.tolist(),
        "right_children": right.tolist(),
        "split_conditions": list(conditions),
        "split_indices": np.where(is_leaf, 0, feature).tolist(),
        "split_type": [0] * n_nodes,
        "sum_hessian": zeros,
        "tree_param": tree_param(n_features, n_nodes),
    }


def tree_param(n_features: int, n_nodes: int) -> dict[str, str]:
    """Return what a tree's document says of its size."""
    sizes = {"num_deleted": 0, "num_feature": n_features, "num_nodes": n_nodes, "size_leaf_vector": 1}
    return {name: str(size) for name, size in sizes.items()}


def empty_tree_document(number: int, tree: Tree, candidates: Candidates) -> dict[str, Any]:
    """Return the document of a tree's structure; all leaves are 0.

    XGBoost sends x < threshold to the left, the candidates x <= c: the threshold is the next float32 above c.
    """
    values: NDArray[np.float32] = np.zeros(tree.feature.size, dtype=np.float32)
    for node in np.flatnonzero(tree.feature != LEAF):
        cut = candidates.of_feature[tree.feature[node]][tree.candidate[node]]
        values[node] = np.nextafter(cut, np.float32(np.inf))
    n_features = len(candidates.of_feature)
    return tree_document(number, n_features, tree.left, tree.right, tree.feature, shortest_decimals(values))


def model_document(
    trees: Sequence[dict[str, Any]],
    n_features: int,
    *,
    batch_size: int,
    objective: str,
    base_score: str,
    feature_names: Sequence[str] = (),
    n_classes: int = 1,
    class_of_tree: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the document of a model.

    Args:
        trees: their documents, in the order of boosting: per round ``batch_size`` of them for each class; the last
            round may have fewer.
        objective: one without parameters of its own.
        base_score: of one output, as XGBoost writes it, such as "[5E-1]".
        n_classes: outputs of the model; 1 for two classes and for numbers.
        class_of_tree: which output each tree adds to; empty for a model with one.
    """
    parameters: dict[str, Any] = {"reg_loss_param": {"scale_pos_weight": "1"}}
    if n_classes > 1:
        parameters = {"softmax_multiclass_param": {"num_class": str(n_classes)}}
    return {
        "version": _XGBOOST_VERSION,
        "learner": {
            "attributes": {},
            "feature_names": list(feature_names),
            "feature_types": [],
            "gradient_booster": {
                "name": "gbtree",
                "model": {
                    "cats": dict(NO_LISTS),
                    "gbtree_model_param": {"num_parallel_tree": str(batch_size), "num_trees": str(len(trees))},
                    "iteration_indptr": [*range(0, len(trees), batch_size * n_classes), len(trees)],
                    "tree_info": list(class_of_tree or [0] * len(trees)),
                    "trees": list(trees),
                },
            },
            "learner_model_param": {
                "base_score": f"[{','.join([base_score[1:-1]] * n_classes)}]",
                "boost_from_average": "0",
                "num_class": str(n_classes) if n_classes > 1 else "0",
                "num_feature": str(n_features),
                "num_target": "1",
            },
            "objective": {"name": objective} | parameters,
        },
    }


def shortest_decimals(values: NDArray[np.float32]) -> list[float]:
    """Return the shortest decimals that read back as the same float32."""
    return [float(str(value)) for value in values]


def written(booster: xgb.Booster) -> bytes:
    """Return a model of such trees as XGBoost writes it, as JSON that is the same whatever wheel has written it.

    XGBoost puts its own version at the end; the documents' stands there instead.
    """
    document = bytes(booster.save_raw("json"))
    version = ",".join(map(str, _XGBOOST_VERSION))
    return document[: document.rindex(b'"version":')] + f'"version":[{version}]}}'.encode()


# Trees of a model document that others may have written: what XGBoost takes on trust.
#
# A wrong child, column or output would have it read and write beyond the tree, the row or the answer, or go in a
# circle.


_BY_CATEGORY = 1  # XGBoost's split_type
_NODE_FIELDS = (
    "left_children",
    "right_children",
    "split_indices",
    "split_conditions",
    "default_left",
    "split_type",
    "parents",
)
_LARGEST = float(np.finfo(np.float32).max)
_ROOT_PARENT = (2**31 - 1, -1)  # XGBoost's; the second in trees of vectors


def check_trees(learner: Mapping[str, Any], n_features: int) -> set[int]:
    """Check all trees of a model; return the columns that they split by category.

    Args:
        learner: that part of XGBoost's document.

    Raises:
        ValueError: they are no trees over so many columns.
    """
    splits: set[int] = set()
    try:
        _check_rounds(learner)
        for tree in trees_model(learner)["trees"]:
            splits |= _categorical_splits(tree, n_features)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError):
        raise ValueError("not the trees of a model") from None
    return splits


def leaf_size(tree: Mapping[str, Any]) -> int:
    """Return how many values a leaf has."""
    return int(tree["tree_param"].get("size_leaf_vector", 1))


def _check_rounds(learner: Mapping[str, Any]) -> None:
    """Check to which round, and to which output, every tree belongs.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it does not follow.
    """
    model = trees_model(learner)
    n_trees, starts = len(model["trees"]), model.get("iteration_indptr", [0])
    if (
        any(type(number) is not int or number < 0 for number in (*model["tree_info"], *starts))
        or not len(model["tree_info"]) == int(model["gbtree_model_param"]["num_trees"]) == n_trees
        or ("iteration_indptr" in model and (starts[0], starts[-1]) != (0, n_trees))
        or sorted(starts) != starts
    ):
        raise ValueError
    for holder in (learner["gradient_booster"], model):
        if "weight_drop" in holder:
            numbers_of(holder["weight_drop"], n_trees)
    n_classes = max(int(learner["learner_model_param"].get("num_class", 0)), 1)
    for number, tree in enumerate(model["trees"]):
        if tree.get("id", number) != number or leaf_size(tree) not in (0, 1, n_classes):
            raise ValueError


def _categorical_splits(tree: Mapping[str, Any], n_features: int) -> set[int]:
    """Check one tree; return the columns that it splits by category.

    Raises:
        ValueError, KeyError, TypeError, IndexError, OverflowError: it is no tree over so many columns.
    """
    n_nodes = int(tree["tree_param"]["num_nodes"])
    left, right, feature, condition, default, kind, parents = (numbers_of(tree[name], n_nodes) for name in _NODE_FIELDS)
    inner = left != -1
    children, unused = np.concatenate([left[inner], right[inner]]), int(tree["tree_param"].get("num_deleted", 0))
    # Each node but the root is the child of one node: then no path from the root goes in a circle.
    if not np.isin(children, np.arange(1, n_nodes)).all() or children.size != n_nodes - 1 - unused:
        raise ValueError
    children = children.astype(np.int64)
    # A leaf has no child; one of vectors names its vector there.
    n_vectors = numbers_of(tree["leaf_weights"]).size // leaf_size(tree) if leaf_size(tree) > 1 else 0
    if (
        np.unique(children).size != children.size
        or parents[0] not in _ROOT_PARENT
        or not np.isin(right[~inner], np.arange(n_vectors) if n_vectors else -1).all()
        or not np.array_equal(parents[children], np.concatenate([np.flatnonzero(inner)] * 2))
        or not np.isin(feature[inner], np.arange(n_features)).all()
        or not np.isin([default, kind], (0, 1)).all()
        or (np.abs(condition[~inner]) > _LARGEST).any()
    ):
        raise ValueError
    by_category = inner & (kind == _BY_CATEGORY)
    _check_category_sets(tree, np.flatnonzero(by_category))
    return set(feature[by_category].astype(int).tolist())


def _check_category_sets(tree: Mapping[str, Any], nodes: NDArray[np.int64]) -> None:
    sets, where = tree["categories"], tree["categories_nodes"]
    starts, sizes = tree["categories_segments"], tree["categories_sizes"]
    if sorted(where) != nodes.tolist() or not len(where) == len(starts) == len(sizes):
        raise ValueError
    if any(start < 0 or size < 1 or start + size > len(sets) for start, size in zip(starts, sizes, strict=True)):
        raise ValueError
    if any(type(one) is not int or not 0 <= one < 2**24 for one in sets):
        raise ValueError


def numbers_of(values: Sequence[Any], n: int | None = None) -> NDArray[np.float64]:
    """Return a field of a tree. Shapes: result: float64[n]. Raises: ValueError, TypeError: it holds no such numbers."""
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (array.size if n is None else n,) or np.isnan(array).any():
        raise ValueError
    return array


# Splits by categories in the document of a tree: which categories go right, in the flat form that XGBoost keeps.


CATEGORY_FIELDS = ("categories", "categories_nodes", "categories_segments", "categories_sizes")


def category_sets(tree: Mapping[str, Any]) -> dict[int, tuple[int, ...]]:
    """Return the categories of each node that is split by them, ascending. Raises: ValueError, TypeError."""
    listed, *places = (tree.get(name, []) for name in CATEGORY_FIELDS)
    sets = {
        int(node): tuple(int(one) for one in listed[start : start + size])
        for node, start, size in zip(*places, strict=True)
    }
    n_nodes = len(tree["left_children"])
    if any(
        not 0 <= node < n_nodes or not places or list(places) != sorted(set(places)) for node, places in sets.items()
    ):
        raise ValueError("sets of categories that are none")
    return sets


def set_categories(tree: dict[str, Any], node: int, categories: tuple[int, ...]) -> None:
    """Make a node one that is split by categories, as XGBoost writes it."""
    sets = {**category_sets(tree), node: categories}
    tree["split_type"][node] = _BY_CATEGORY
    tree.update(category_fields(sets))


def category_fields(sets: Mapping[int, Sequence[int]]) -> dict[str, list[int]]:
    """Return what a tree's document says of the categories of nodes that are split by them."""
    nodes = sorted(sets)
    listed, sizes = [one for node in nodes for one in sets[node]], [len(sets[node]) for node in nodes]
    starts = np.cumsum([0, *sizes])[:-1].tolist()
    return dict(zip(CATEGORY_FIELDS, (listed, nodes, starts, sizes), strict=True))
