"""A finished model, scores of rows under it, and why."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import machine_failure
from nvflare_plugins.base.formatting import number, printable
from nvflare_plugins.pages.charts import Bar, horizontal_bars, picture
from nvflare_plugins.xgb import model_json
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.continuation import clipping_of, recalibrated
from nvflare_plugins.xgb.objectives import OBJECTIVES

# A finished model as a site scores with it: read strictly, with the public lists that it carries.
#
# Any tree model of XGBoost's in JSON will do that names its columns and has an objective of VeilBoost's: models of
# horizontal, bagging, private and DPBoost jobs, merged vertical ones, and stock XGBoost's own without categories. What
# only looks like a whole model is refused: a part of a vertical model, or its masked copy, whose answers would be
# wrong.


ALL_ROUNDS, BEST_ROUND = "all", "best"
_PART = (
    "is one party's part of a vertical model, which cannot score by itself: run an inference job over all parties "
    "(VerticalInferenceRecipe), or its action merge, if every party consents, and score with merged_model.json"
)
_UNMARKED_PART = "masked_model.json"  # 0.3.0 and before wrote it without the attribute
_NO_MODEL = "is no JSON model of XGBoost: give the model.json of a run, or what XGBoost's save_model wrote as JSON"
_CUT_OFF = "is not whole JSON, cut off or damaged: copy it again from the run"
_DAMAGED = "holds a tree that is none: copy it again from the run"
_BINARY = ("binary:logistic", "binary:logitraw", "binary:hinge")
_MULTICLASS = ("multi:softprob", "multi:softmax")
_COVER_SLACK = 1e-3  # of a node's cover: sums in float32 depend on their order


class ScoringError(ConfigurationError, ValueError):
    """A model or a table cannot be scored with; the message names file, column, count and remedy, never a value.

    Also a ``ValueError``, which scikit-learn expects of an estimator that is given a table it cannot use.
    """


@dataclass(frozen=True, slots=True)
class Feature:
    """A column of the model. Attributes: categories: its public list; None for a column of numbers."""

    name: str
    categories: tuple[str, ...] | None = None


class FinishedModel:
    """A model that one site can score with.

    Attributes:
        name: of the file, for messages.
        content: of the file.
        trees: in XGBoost's JSON; not to be changed.
        features: its columns, in order.
        objective: XGBoost's name of it.
        classes: the label's classes in the order of the model's outputs, under the names that the job declared, or
            0, 1, ...; None for a regression.
        n_rounds: boosting rounds.
        best_round: of early stopping, from 0; None without.
        has_probabilities: whether it gives a probability for each class.
        loss_of_times: of a survival model XGBoost's ``aft_loss_param``: its distribution and scale; None for others.
        clipped_at: where the gradients of its training were clipped; None if they were not. Its probabilities are then
            not XGBoost's answers, but follow from them (``recalibrated``).

    Raises:
        ScoringError: it is no such model.
    """

    def __init__(self, content: bytes, name: str) -> None:
        self.name, self.content = name, content
        document = self.document()
        learner = document["learner"]
        attributes = learner.get("attributes", {})
        if model_json.PART_ATTRIBUTE in attributes:
            raise self._error(_PART)
        self.objective = str(learner["objective"]["name"])
        self.trees: list[dict[str, Any]] = model_json.trees_model(learner)["trees"]
        self._lacks_covers = model_json.COVERS_ATTRIBUTE in attributes
        self.features = self._read_features(learner, attributes)
        self._check_trees(learner)
        self.classes = self._read_classes(learner, attributes)
        self.loss_of_times = self._read_loss(learner["objective"]) if self.objective == "survival:aft" else None
        self.clipped_at = self._read_clipping(attributes)
        self._booster = self._load(document)
        self.n_rounds = self._booster.num_boosted_rounds()
        best = attributes.get("best_iteration", "")
        self.best_round = int(best) if best.isdecimal() and int(best) < self.n_rounds else None
        self.has_probabilities = self.classes is not None and self.objective != "binary:hinge"

    @property
    def direction_of_times(self) -> int:
        """1 where larger predictions mean later events, -1 for hazards; 0 of a model that is not of times."""
        return {"survival:aft": 1, "survival:cox": -1}.get(self.objective, 0)

    @property
    def has_vector_leaves(self) -> bool:
        """Whether a tree was grown with multi_output_tree."""
        return any(model_json.leaf_size(tree) > 1 for tree in self.trees)

    @classmethod
    def read(cls, path: str | Path) -> FinishedModel:
        """Read a model file.

        Raises:
            ScoringError: no such file, or no such model.
        """
        path, shown = Path(path), printable(str(path))
        if path.is_dir():
            raise ScoringError(f"{shown} is a folder: name the model.json in it")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ScoringError(f"{shown} cannot be read: {machine_failure(error) or type(error).__name__}") from None
        if path.name == _UNMARKED_PART:
            raise ScoringError(f"{shown} {_PART}.")
        return cls(content, shown)

    def __reduce__(self) -> tuple[type[FinishedModel], tuple[bytes, str]]:
        return FinishedModel, (self.content, self.name)

    # -- scoring ------------------------------------------------------------------------------------------------------

    def predict(
        self, values: NDArray[np.float32], rounds: str | int = ALL_ROUNDS, *, output_margin: bool = False
    ) -> NDArray[np.float32]:
        """Return what XGBoost's ``predict`` returns for this model.

        Shapes: values: float32[n_rows, n_features] in the form of training: numbers, positions in the lists, NaN where
            missing; result: float32[n_rows], or float32[n_rows, n_classes] for multi:softprob, and for the margins of
            multi:softmax.

        Args:
            rounds: "all", "best" for those up to the best round of early stopping, or how many of the first ones.
        """
        if values.shape[0] == 0:  # XGBoost warns of such a table, and forgets how wide its answer would be
            is_wide = self.objective == "multi:softprob" or (output_margin and self.objective == "multi:softmax")
            return np.empty((0, len(self.classes or ())) if is_wide else 0, dtype=np.float32)
        return self._booster.predict(
            xgb.DMatrix(values), output_margin=output_margin, iteration_range=(0, self._end(rounds))
        )

    def probabilities(self, values: NDArray[np.float32], rounds: str | int = ALL_ROUNDS) -> NDArray[np.float32]:
        """Return each class's probability, in the order of ``classes``.

        For binary:logistic and multi:softprob the numbers are XGBoost's own, unless the model was trained on clipped
        gradients. Those of binary:logitraw and multi:softmax, whose predictions are margins and classes, follow from
        the margins by the same functions.

        Shapes: values: as ``predict``; result: float32[n_rows, n_classes].
        """
        if self.objective in ("multi:softprob", "binary:logistic"):
            scores = self.predict(values, rounds)
            if self.clipped_at is not None:
                scores = recalibrated(scores, self.clipped_at)
            return scores if scores.ndim == 2 else np.column_stack([np.float32(1) - scores, scores])
        margins = self.predict(values, rounds, output_margin=True).astype(np.float64)
        if self.objective == "binary:logitraw":
            from scipy.special import expit

            second = expit(margins).astype(np.float32)
            return np.column_stack([np.float32(1) - second, second])
        powers = np.exp(margins - margins.max(axis=1, keepdims=True))
        result: NDArray[np.float32] = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
        return result

    def positions(
        self, values: NDArray[np.float32], rounds: str | int = ALL_ROUNDS, threshold: float | None = None
    ) -> NDArray[np.int64]:
        """Return the place in ``classes`` of each row's class: the second of two where it is above the threshold.

        Shapes: values: as ``predict``; result: int64[n_rows].

        Args:
            threshold: on the probability of the second of two classes; None is 1/2.
        """
        if not self.has_probabilities or self.objective == "multi:softmax":
            return self.predict(values, rounds).astype(np.int64)
        probabilities = self.probabilities(values, rounds)
        if probabilities.shape[1] == 2 and self.objective in _BINARY:
            limit = np.float32(0.5 if threshold is None else threshold)
            return (probabilities[:, 1] > limit).astype(np.int64)
        result: NDArray[np.int64] = probabilities.argmax(axis=1)
        return result

    def leaves(self, values: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the leaf that each row reaches in every tree, as its number in the tree.

        Shapes: values: float32[n_rows, n_features] as ``predict``, with rows; result: int64[n_rows, n_trees].
        """
        found = self._booster.predict(xgb.DMatrix(values), pred_leaf=True)
        return found.reshape(values.shape[0], -1).astype(np.int64)

    def contributions(self, values: NDArray[np.float32], rounds: str | int = ALL_ROUNDS) -> NDArray[np.float32]:
        """Return SHAP values of the margin, the bias last.

        Shapes: values: as ``predict``; result: float32[n_rows, n_outputs, n_features + 1].

        Raises:
            ScoringError: they would be wrong (``check_explainable``).
        """
        self.check_explainable()
        n_outputs = len(self.classes or ()) if self.objective in _MULTICLASS else 1
        shape = (values.shape[0], n_outputs, len(self.features) + 1)
        if values.shape[0] == 0:
            return np.empty(shape, dtype=np.float32)
        found = self._booster.predict(xgb.DMatrix(values), pred_contribs=True, iteration_range=(0, self._end(rounds)))
        if not np.isfinite(found).all():
            raise self._error("gives SHAP values that are no numbers")
        return found.reshape(shape)

    def importances(self) -> NDArray[np.float32]:
        """Return the mean gain of each feature's splits, or their number where there are no gains, of 1 in all.

        Shapes: float32[n_features]; zeros for a model that splits on no feature.
        """
        found = self._booster.get_score(importance_type="gain")
        if not any(found.values()):  # trees that came from single sites have none
            found = self._booster.get_score(importance_type="weight")
        names = self._booster.feature_names or [f"f{place}" for place in range(len(self.features))]
        values = np.array([found.get(name, 0.0) for name in names], dtype=np.float32)
        total = values.sum()
        return values / total if total else values

    def check_explainable(self) -> None:
        """Refuse SHAP values that would look right and are not.

        They weigh the paths of a tree by the cover of its nodes (``sum_hessian``), which are the training rows. A model
        whose covers were not shared, were removed or are noised would give numbers all the same.

        Raises:
            ScoringError: the model's covers are not those of rows, or its leaves are vectors.
        """
        if self.has_vector_leaves:
            raise self._error("has vectors for leaves (multi_output_tree), for which XGBoost computes no SHAP values")
        n_wrong = len(self.trees) if self._lacks_covers else sum(not _are_covers(tree) for tree in self.trees)
        if n_wrong:
            raise self._error(
                f"cannot be explained: in {n_wrong} of {len(self.trees)} trees the covers, by which SHAP values weigh "
                "paths, are not those of training rows (exported copies, bagging and DPBoost have none, those of "
                "private trees are noised). Score without explanations; an exported copy can be explained at the site "
                "that has the model.json it was made from"
            )

    def _end(self, rounds: str | int) -> int:
        if isinstance(rounds, int):
            return rounds
        if rounds == ALL_ROUNDS:
            return self.n_rounds
        if rounds != BEST_ROUND:
            raise ScoringError("rounds: all, or best")
        if self.best_round is None:
            raise self._error("was trained without early stopping and has no best round: leave rounds at all")
        return self.best_round + 1

    # -- reading ------------------------------------------------------------------------------------------------------

    def _error(self, what: str) -> ScoringError:
        return ScoringError(f"{self.name} {what}.")

    def document(self) -> dict[str, Any]:
        """Return the model as XGBoost's JSON document, a copy. Raises: ScoringError: it is none."""
        if not self.content.strip():
            raise self._error("is empty")
        try:
            document = json.loads(self.content)
        except (ValueError, RecursionError):
            begins_well = re.match(rb'\s*\{\s*"', self.content) is not None
            raise self._error(_CUT_OFF if begins_well else _NO_MODEL) from None
        if isinstance(document, dict) and str(document.get("format", "")).startswith("veilboost-vertical-part"):
            raise self._error(_PART)
        try:
            learner = document["learner"]
            kind = learner["gradient_booster"]["name"]
            trees = [] if kind == "gblinear" else model_json.trees_model(learner)["trees"]
            known = isinstance(learner["objective"]["name"], str) and all(isinstance(tree, dict) for tree in trees)
            known = known and all(isinstance(text, str) for text in learner.get("attributes", {}).values())
        except (KeyError, TypeError, AttributeError):
            known, kind, trees = False, None, []
        if kind == "gblinear":
            raise self._error("is a linear model: only trees can be scored")
        if not known or kind not in ("gbtree", "dart"):
            raise self._error(_NO_MODEL)
        if not trees:
            raise self._error("has no trees: there is nothing to score with")
        result: dict[str, Any] = document
        return result

    def _read_features(self, learner: Mapping[str, Any], attributes: Mapping[str, str]) -> tuple[Feature, ...]:
        names = learner.get("feature_names", [])
        try:
            n_features = int(learner["learner_model_param"]["num_feature"])
            lists = json.loads(attributes.get(model_json.CATEGORIES_ATTRIBUTE, "{}"))
            lists = {name: tuple(map(str, values)) for name, values in lists.items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self._error(_NO_MODEL) from None
        if not names and isinstance(names, list):
            raise self._error(
                "does not name its columns, so that rows could be scored by the wrong ones: set feature_names of the "
                "XGBoost booster and save it again"
            )
        are_texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not are_texts or len(set(names)) != n_features or len(names) != n_features:
            raise self._error(_NO_MODEL)
        if not set(lists) <= set(names) or any(len(set(v)) != len(v) or not v for v in lists.values()):
            raise self._error("carries category lists that do not belong to its columns: copy it again from the run")
        return tuple(Feature(name, lists.get(name)) for name in names)

    def _read_classes(self, learner: Mapping[str, Any], attributes: Mapping[str, str]) -> tuple[str | int, ...] | None:
        if self.objective not in OBJECTIVES:
            raise self._error(
                f"has the objective {printable(self.objective)!r}, whose predictions VeilBoost does not know: score it "
                "with XGBoost itself"
            )
        try:
            n_classes = int(learner["learner_model_param"].get("num_class", 0))
            n_targets = int(learner["learner_model_param"].get("num_target", 1))
        except (TypeError, ValueError):
            raise self._error(_DAMAGED) from None
        is_multiclass, groups = self.objective in _MULTICLASS, set(model_json.trees_model(learner)["tree_info"])
        has_vectors = is_multiclass and model_json.leaf_size(self.trees[0]) == n_classes
        n_groups = n_classes if is_multiclass and groups != {0} else 1
        if (
            n_targets not in (0, 1)
            or is_multiclass != (n_classes > 1)
            or (len(groups), max(groups)) != (n_groups, n_groups - 1)
        ):
            raise self._error("has outputs that are not one for each class: score it with XGBoost itself")
        if is_multiclass and (groups == {0}) != has_vectors:
            raise self._error(_DAMAGED)
        if self.objective not in (*_BINARY, *_MULTICLASS):
            return None
        n_outputs = n_classes if is_multiclass else 2
        try:
            return model_json.declared_classes(attributes, n_outputs) or tuple(range(n_outputs))
        except (ValueError, RecursionError):
            raise self._error(
                f"carries label classes that are not the {n_outputs} of its outputs: copy it from the run"
            ) from None

    def _read_loss(self, objective: Mapping[str, Any]) -> Mapping[str, str]:
        loss: dict[str, str] = {}
        try:
            loss = {str(name): str(value) for name, value in objective["aft_loss_param"].items()}
            is_known = loss["aft_loss_distribution"] in ("normal", "logistic", "extreme")
            is_known &= float(loss["aft_loss_distribution_scale"]) > 0
        except (KeyError, AttributeError, ValueError):
            is_known = False
        if not is_known:
            raise self._error("does not say which noise its times have: copy it again from the run")
        return loss

    def _read_clipping(self, attributes: Mapping[str, str]) -> float | None:
        try:
            clipped_at = clipping_of(attributes)
        except ValueError:
            raise self._error("does not say by which number its probabilities follow: copy it from the run") from None
        if clipped_at is not None and self.objective != "binary:logistic":
            raise self._error(_DAMAGED)
        return clipped_at

    def _check_trees(self, learner: Mapping[str, Any]) -> None:
        """Check what XGBoost takes on trust: a wrong child or column would have it read beyond the tree or the row."""
        try:
            splits = model_json.check_trees(learner, len(self.features))
        except ValueError:
            raise self._error(_DAMAGED) from None
        unlisted = [feature.name for i, feature in enumerate(self.features) if i in splits and not feature.categories]
        if unlisted:
            shown = ", ".join(repr(printable(name)) for name in unlisted[:5])
            raise self._error(
                f"splits {len(unlisted)} columns by category without the lists that VeilBoost's models carry "
                f"({shown}): score it with XGBoost itself"
            )

    def _load(self, document: Mapping[str, Any]) -> xgb.Booster:
        try:
            booster = xgb.Booster(model_file=bytearray(model_json.bare_model(document)))
            booster.predict(xgb.DMatrix(np.zeros((1, len(self.features)), dtype=np.float32)))
        except (xgb.core.XGBoostError, ValueError):
            raise self._error(f"cannot be read by XGBoost {xgb.__version__}: {_DAMAGED.partition(': ')[2]}") from None
        return booster


def _are_covers(tree: Mapping[str, Any]) -> bool:
    """Tell whether a tree's covers can be those of rows: above zero, and each the sum of its children's.

    Noise may leave it so. Trees that XGBoost grows on rows gain at every split; private ones, which are drawn at random
    or grown without gains, do not.
    """
    left, right = np.asarray(tree["left_children"]), np.asarray(tree["right_children"])
    inner = left >= 0
    if not inner.any():
        return True
    try:
        cover, gain = (
            model_json.numbers_of(tree["sum_hessian"], left.size),
            model_json.numbers_of(tree["loss_changes"], left.size),
        )
    except (KeyError, ValueError, TypeError):
        return False
    parts, whole = cover[left[inner]] + cover[right[inner]], cover[inner]
    reached = np.concatenate([[0], left[inner], right[inner]])
    is_sum = np.abs(parts - whole) <= _COVER_SLACK * np.abs(whole)
    return bool(np.isfinite(cover).all() and (cover[reached] > 0).all() and is_sum.all() and (gain[inner] > 0).all())


# SHAP values of a finished model as columns of a file, and the picture of its strongest features.
#
# SHAP values explain the margin: log-odds for binary:logistic, a score for each class under multi:softprob, the
# logarithm of the answer for count:poisson, reg:gamma and reg:tweedie, the answer itself for other regressions. Those
# of a row, and the bias, add up to its margin.
#
# Reference: Lundberg et al., Consistent individualized feature attribution for tree ensembles (2018), algorithm 2.


_MOST_BARS = 20
_BIAS = "bias"


def shap_columns(model: FinishedModel, contributions: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """Return SHAP values by the name of their column: shap.FEATURE, or shap.CLASS.FEATURE; last the bias, shap_bias.

    Shapes: contributions: as ``FinishedModel.contributions``; float32[n_rows] each.
    """
    n_outputs = contributions.shape[1]
    outputs = [""] if n_outputs == 1 else [f".{one}" for one in model.classes or ()]
    columns: dict[str, NDArray[np.float32]] = {}
    for output, of_class in enumerate(outputs):
        names = [*(f"shap{of_class}.{feature.name}" for feature in model.features), f"shap_{_BIAS}{of_class}"]
        columns |= {name: contributions[:, output, place] for place, name in enumerate(names)}
    return columns


class Strengths:
    """Mean absolute SHAP values of a model's features, over rows that are seen some at a time."""

    def __init__(self, model: FinishedModel) -> None:
        self._model, self.n_rows = model, 0
        self._sums: NDArray[np.float64] = np.zeros(len(model.features))

    def add(self, contributions: NDArray[np.float32]) -> None:
        """Take rows into account. Shapes: contributions: as ``FinishedModel.contributions``."""
        if contributions.shape[0]:
            self.n_rows += contributions.shape[0]
            self._sums += np.abs(contributions[:, :, :-1].astype(np.float64)).mean(axis=1).sum(axis=0)

    def ranked(self) -> list[tuple[str, float]]:
        """Return features with their mean over at least one row, the largest first."""
        strength = self._sums / self.n_rows
        order = np.argsort(-strength, kind="stable")
        return [(self._model.features[place].name, float(strength[place])) for place in order]

    def picture(self) -> bytes:
        """Return the strongest features of at least one row as SVG."""
        ranked = [entry for entry in self.ranked() if entry[1] > 0][:_MOST_BARS]
        bars = [Bar(name, value, number(value)) for name, value in ranked]
        caption = f"Mean |SHAP value| of the margin over {self.n_rows:,} rows"
        return picture(horizontal_bars(bars), caption).encode()
