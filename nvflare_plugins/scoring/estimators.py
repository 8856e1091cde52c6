"""A finished model in scikit-learn's form: it predicts, and is fitted to a federation, never to one table.

``classes_`` is sorted, as scikit-learn's scorers expect, whatever the order in which the job declared the classes; the
columns of ``predict_proba`` go with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import estimator_html_repr
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from nvflare_plugins.data.declaration import MISSING_TEXTS
from nvflare_plugins.data.tabular_files import column_of_frame, days_of, distinct_texts, is_text, is_time, taken
from nvflare_plugins.data.text_values import DatePattern, days_in_frame
from nvflare_plugins.pages.charts import Bar, horizontal_bars, picture
from nvflare_plugins.scoring.columns import PYTHON, check_names, matrix_of, narrowed
from nvflare_plugins.scoring.explanation import concordance, survival
from nvflare_plugins.scoring.model import ALL_ROUNDS, FinishedModel, ScoringError, shap_columns
from nvflare_plugins.scoring.noise import NoiseOfScores

_SHOWN = 15

_NO_FIT = (
    "is trained by a federated job and cannot be fitted to one table: fit it to a federation (veilboost.simulate), or "
    "load() the model that the job wrote, and put it into sklearn.frozen.FrozenEstimator where scikit-learn would fit "
    "it again"
)


def load_model(
    path: str | Path,
    *,
    rounds: str = ALL_ROUNDS,
    unknown_is_missing: bool = False,
    dates: Mapping[str, str] | None = None,
) -> VeilBoostClassifier | VeilBoostRegressor:
    """Return the estimator that fits a finished model.

    Args:
        path: model.json of a run, or merged_model.json.
        rounds: "all", or "best" for those up to the best round of early stopping.
        unknown_is_missing: categories that are in no list of the model count as missing instead of being refused.
        dates: column -> pattern of its texts, as the data set's in the site's policy.

    Raises:
        ScoringError: no such file, or no model that one site can score with.
    """
    model = FinishedModel.read(path)
    kind = VeilBoostRegressor if model.classes is None else VeilBoostClassifier
    kind = VeilBoostSurvival if model.direction_of_times else kind
    return kind(rounds=rounds, unknown_is_missing=unknown_is_missing, dates=dates)._with(model)


class _FinishedEstimator(BaseEstimator):
    """What classifier and regressor have in common.

    Args:
        rounds: "all", or "best" for those up to the best round of early stopping.
        unknown_is_missing: categories that are in no list of the model count as missing instead of being refused.
        dates: column -> pattern of its texts (such as DD.MM.YYYY), read as days since 1970-01-01 as in training;
            declared dates and times are what they are.

    Attributes:
        feature_names_in_, n_features_in_: of the model.
    """

    def __init__(
        self,
        *,
        rounds: str = ALL_ROUNDS,
        unknown_is_missing: bool = False,
        dates: Mapping[str, str] | None = None,
    ) -> None:
        self.rounds = rounds
        self.unknown_is_missing = unknown_is_missing
        self.dates = dates

    @classmethod
    def load(cls, path: str | Path, *, rounds: str = ALL_ROUNDS, unknown_is_missing: bool = False) -> Self:
        """Return the estimator of a finished model.

        Raises:
            ScoringError: no such file, no model that one site can score with, or one of the other kind.
        """
        return cls(rounds=rounds, unknown_is_missing=unknown_is_missing)._with(FinishedModel.read(path))

    def fit(self, X: Any, y: Any = None, **fit_params: Any) -> Self:
        """Train over a federation (``veilboost.simulate``); one table is refused, as no site hands its rows out.

        Args:
            X: a federation, which has the label.
            fit_params: what its ``train`` takes: method, rounds, profile.

        Raises:
            NotImplementedError: X is a table.
            SitesRefused: what its sites refuse.
        """
        train = getattr(X, "train", None)
        if train is None or y is not None:
            raise NotImplementedError(f"{type(self).__name__} {_NO_FIT}")
        return self._with(train(**fit_params).model.model_)

    @property
    def feature_importances_(self) -> NDArray[np.float32]:
        """Mean gain of each feature's splits, of 1 in all; of their number where the model has no gains.

        Shapes: float32[n_features], as XGBoost's estimators have it.
        """
        check_is_fitted(self)
        return self.model_.importances()

    def explain(self, X: Any) -> pd.DataFrame:
        """Return each row's SHAP values of the margin, and the bias; they add up to the margin.

        Shapes: one row for each of X, under its index; one column for each feature and class.

        Raises:
            ScoringError: the model's covers are not those of training rows, so that the values would be wrong.
        """
        columns = shap_columns(self.model_, self.model_.contributions(self._values(X), self.rounds))
        return _beside(X, columns)

    def _repr_html_(self) -> str:
        """Return scikit-learn's own picture and, of a finished model, its strongest features."""
        own = str(estimator_html_repr(self))
        if not hasattr(self, "model_"):
            return own
        strongest = sorted(zip(self.feature_importances_, self.feature_names_in_, strict=True), reverse=True)[:_SHOWN]
        bars = [Bar(str(name), float(share), f"{100 * share:.1f} %") for share, name in strongest if share]
        words = f"{self.model_.objective}, {self.model_.n_rounds} rounds; importance by gain"
        drawn = picture(horizontal_bars(bars), words) if bars else ""
        return own + f"<div>{drawn}</div>"

    def _with(self, model: FinishedModel) -> Self:
        self.model_ = model
        self.feature_names_in_ = np.array([feature.name for feature in model.features], dtype=object)
        self.n_features_in_ = len(model.features)
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = tags.input_tags.categorical = True
        return tags

    def _values(self, X: Any) -> NDArray[np.float32]:
        """Return rows as the model was trained on them. Shapes: float32[n_rows, n_features]."""
        check_is_fitted(self, msg=f"%(name)s holds no model yet: it {_NO_FIT.partition('; ')[0]}")
        model = self.model_
        if sparse.issparse(X):
            raise TypeError("Sparse data was passed, but dense data is required: use X.toarray()")
        frame = _frame_of(X)
        if frame is None:
            array = _array_of(X)
            self._check_width(array)
            if array.dtype.kind in "buif" and all(feature.categories is None for feature in model.features):
                values, n_infinite = narrowed(array)
                if n_infinite:
                    raise ScoringError(f"X holds {n_infinite} values that are infinite or too large for float32.")
                return values
            # As objects: what pandas makes of a column by itself fails for some texts.
            frame = pd.DataFrame(array, columns=self.feature_names_in_, dtype=object if array.dtype == object else None)
        names = [str(name) for name in frame.columns]
        check_names("X", model.features, names, PYTHON)
        columns = {name: self._dated(name, column_of_frame(frame.iloc[:, place])) for place, name in enumerate(names)}
        return matrix_of(
            "X", model.features, columns, MISSING_TEXTS, unknown_is_missing=self.unknown_is_missing, remedies=PYTHON
        )

    def _dated(self, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return dates as days since 1970-01-01; another column as it is. Raises: ScoringError: text that is none."""
        pattern = DatePattern.of((self.dates or {}).get(name, ""))
        if pattern is not None and is_time(column.type):
            return pa.chunked_array([pa.array(days_of(column))])
        if pattern is None or not is_text(column.type):
            return column
        texts, codes = distinct_texts(column)
        days = [np.nan if one.strip() in ("", *MISSING_TEXTS) else days_in_frame(pattern, one.strip()) for one in texts]
        if None in days:
            raise ScoringError(f"column {name!r} holds text that is no date of the pattern {pattern.text}: mend dates")
        return pa.chunked_array([pa.array(taken(days, codes))])

    def _check_width(self, array: NDArray[Any]) -> None:
        if array.shape[1] != self.n_features_in_:
            raise ScoringError(
                f"X has {array.shape[1]} features, but {type(self).__name__} is expecting {self.n_features_in_} "
                "features as input."
            )
        warnings.warn(
            f"X does not have valid feature names, but {type(self).__name__} was fitted with feature names",
            UserWarning,
            stacklevel=4,
        )


class VeilBoostRegressor(RegressorMixin, _FinishedEstimator):
    """A finished model that predicts numbers."""

    def _with(self, model: FinishedModel) -> Self:
        if model.classes is not None:
            raise ScoringError(f"{model.name} predicts classes: use VeilBoostClassifier, or load_model.")
        return super()._with(model)

    def predict(self, X: ArrayLike) -> NDArray[np.float32]:
        """Return a number for each row, bit for bit XGBoost's. Shapes: float32[n_rows]."""
        values = self._values(X)
        return self.model_.predict(values, self.rounds)


class VeilBoostSurvival(VeilBoostRegressor):
    """A finished survival model: it predicts times, or hazards where it is one of ``survival:cox``."""

    def _with(self, model: FinishedModel) -> Self:
        if not model.direction_of_times:
            raise ScoringError(f"{model.name} is no model of times: use load_model.")
        return super()._with(model)

    def predict_survival(self, X: ArrayLike, times: ArrayLike) -> NDArray[np.float64]:
        """Return the chance that each row's event comes after each time.

        Shapes: times: float[n_times], at least 0; result: float64[n_rows, n_times].

        Raises:
            ScoringError: a model of hazards, which says nothing of times without the hazard that all rows share.
        """
        loss = self.model_.loss_of_times
        if loss is None:
            raise ScoringError(f"{self.model_.name} predicts hazards, which order rows and name no chance at a time.")
        predicted, at = self.predict(X).astype(np.float64), np.asarray(times, dtype=np.float64).reshape(-1)
        return np.column_stack([survival(loss, predicted, float(time)) for time in at])

    def score(self, X: ArrayLike, y: Any, sample_weight: Any = None) -> float:
        """Return Harrell's concordance of predictions; weights have no part in it.

        Args:
            y: times and whether an event was seen then, as two columns; or lower and upper bounds with NaN or infinity
                where there is none, as a table with columns "lower" and "upper".
        """
        frame = pd.DataFrame(y)
        if {"lower", "upper"} <= set(frame.columns):
            lower, upper = frame["lower"].fillna(0), frame["upper"].fillna(np.inf)
        else:
            lower, event = frame.iloc[:, 0], frame.iloc[:, 1].astype(bool)
            upper = lower.where(event, np.inf)
        bounds = np.column_stack([lower, upper]).astype(np.float64)
        return concordance(bounds, self.model_.direction_of_times * self.predict(X).astype(np.float64))


def _has_probabilities(estimator: VeilBoostClassifier) -> bool:
    model = getattr(estimator, "model_", None)
    if model is not None and not model.has_probabilities:
        raise AttributeError(f"{model.name} has the objective {model.objective}, which gives no probabilities")
    return True


class VeilBoostClassifier(ClassifierMixin, _FinishedEstimator):
    """A finished model that predicts classes.

    Attributes:
        classes_: the label's classes under the names that the job declared, sorted; 0, 1, ... without such names.
    """

    def _with(self, model: FinishedModel) -> Self:
        if model.classes is None:
            raise ScoringError(f"{model.name} predicts numbers: use VeilBoostRegressor, or load_model.")
        self.classes_, self._order = _sorted_classes(model.classes)
        return super()._with(model)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the class of each row. Shapes: [n_rows]."""
        values = self._values(X)
        place = np.argsort(self._order)[self.model_.positions(values, self.rounds)]
        return self.classes_[place]

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: ArrayLike) -> NDArray[np.float32]:
        """Return the probabilities of ``classes_``, bit for bit XGBoost's. Shapes: float32[n_rows, n_classes]."""
        values = self._values(X)
        return self.model_.probabilities(values, self.rounds)[:, self._order]

    def noise_interval(self, X: ArrayLike, run: str | Path) -> pd.DataFrame:
        """Return what the noise alone may have done to each score of a private model, as ``predict --explain`` has it.

        ``noise_std`` is the deviation of the margin. In 95 of 100 trainings the probability of the second declared
        class that the same trees would give without noise lies from ``noise_low`` to ``noise_high``.

        Shapes: one row for each of X, under its index. Privacy: follows from the model and public figures.

        Args:
            run: folder of the run that trained the model, with its run.json.

        Raises:
            ScoringError: the run tells no noise of this model: only private boosted random trees for two classes do.
        """
        values, model = self._values(X), self.model_
        noise = NoiseOfScores.of_run(Path(run), model)
        if noise is None:
            raise ScoringError(
                f"{run} tells no noise of {model.name}: name the folder of its own run, of a private job on two "
                "classes with boosted random trees"
            )
        return _beside(X, noise.columns(values))


def _sorted_classes(classes: Sequence[str | int]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return classes in ascending order, and where each stands among the model's outputs."""
    are_numbers = all(isinstance(one, int) for one in classes)
    names = np.array(classes) if are_numbers else np.array([str(one) for one in classes])
    order = np.argsort(names, kind="stable")
    return names[order], order


def _beside(X: Any, columns: Mapping[str, NDArray[np.float32]]) -> pd.DataFrame:
    return pd.DataFrame(columns, index=X.index if isinstance(X, pd.DataFrame) else None)


def _frame_of(rows: Any) -> pd.DataFrame | None:
    """Return a table with names of columns as a pandas frame; None for anything else."""
    if isinstance(rows, pd.DataFrame):
        return rows
    if hasattr(rows, "__arrow_c_stream__") and not isinstance(rows, pd.Series):  # polars, Arrow
        return pa.table(rows).to_pandas(types_mapper=pd.ArrowDtype)
    return None


def _array_of(rows: Any) -> NDArray[Any]:
    array = np.asarray(rows)
    if array.dtype.kind == "c":
        raise ScoringError("Complex data not supported: X must hold real numbers.")
    if array.ndim != 2:
        raise ScoringError(
            f"Expected 2D array, got {array.ndim}D array instead. Reshape your data either using array.reshape(-1, 1) "
            "if your data has a single feature or array.reshape(1, -1) if it contains a single sample."
        )
    return array
