"""Finished models among scikit-learn's estimators."""

from __future__ import annotations

import inspect
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import xgboost as xgb
from scipy import sparse
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import get_scorer, roc_auc_score
from sklearn.model_selection import FixedThresholdClassifier, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import Table, load_table
from nvflare_plugins.scoring import ScoringError, VeilBoostClassifier, VeilBoostRegressor, load_model
from nvflare_plugins.scoring.comparison import scores_of
from nvflare_plugins.scoring.explanation import row_figures
from nvflare_plugins.scoring.export import strip_sum_hessian
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.xgb.model_json import with_lists
from tests.support.scoring import CLASSES, COLOURS, NAMES, changed, frame, label_of, positions, train

BINARY = {"objective": "binary:logistic"}


# -- scikit-learn's own checks ----------------------------------------------------------------------------------------
# All of them fit an estimator first, which a finished model refuses. Here fit trains XGBoost, writes the model as a job
# does and loads it, so that everything they ask of a fitted estimator is asked of what a user loads. They pass without
# an exception from the list. Not asked: that columns in another order are refused; they are taken by name here.


class _Trained:
    def _train(self, X: Any, y: Any, params: dict[str, Any], classes: Any) -> Any:
        names = [str(name) for name in X.columns] if isinstance(X, pd.DataFrame) else None
        values, label = validate_data(self, X, y, ensure_all_finite="allow-nan", dtype=np.float32)
        names = names or [f"f{i}" for i in range(values.shape[1])]
        label = label if classes is None else np.searchsorted(classes, label)
        matrix = xgb.DMatrix(values, label=label, feature_names=names)
        content = bytes(xgb.train({"max_depth": 3, "nthread": 1, "eta": 0.5, **params}, matrix, 5).save_raw("json"))
        public = None if classes is None else np.asarray(classes).tolist()
        return self._with(FinishedModel(with_lists(content, names, {}, public), "model.json"))


class TrainedClassifier(_Trained, VeilBoostClassifier):
    def fit(self, X: Any, y: Any) -> Any:
        _, label = validate_data(self, X, y, ensure_all_finite="allow-nan", dtype=np.float32)
        check_classification_targets(label)
        classes = np.unique(label)
        if len(classes) < 2:
            raise ValueError("the label holds 1 class")
        softprob = {"objective": "multi:softprob", "num_class": len(classes)}
        return self._train(X, y, BINARY if len(classes) == 2 else softprob, classes)


class TrainedRegressor(_Trained, VeilBoostRegressor):
    def fit(self, X: Any, y: Any) -> Any:
        return self._train(X, y, {"objective": "reg:squarederror"}, None)


@parametrize_with_checks([TrainedClassifier(), TrainedRegressor()])
def test_checks_of_scikit_learn(estimator: Any, check: Callable[[Any], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


def test_only_checks_that_fit_to_one_table_are_left_out_of_the_estimator_as_it_is() -> None:
    """As above they pass where fit trains; here each that fails does so because fit refuses a table, and says so."""
    if "on_fail" not in inspect.signature(check_estimator).parameters:
        pytest.skip("this scikit-learn does not hand out the outcomes of its checks")
    for estimator in (VeilBoostClassifier(), VeilBoostRegressor()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcomes = check_estimator(estimator, on_skip=None, on_fail=None)
        passed = {one["check_name"] for one in outcomes if one["status"] == "passed"}
        left_out = [one for one in outcomes if one["status"] == "failed"]
        assert {"check_estimator_cloneable", "check_estimator_repr", "check_no_attributes_set_in_init"} <= passed
        for one in left_out:
            chain = [one["exception"], one["exception"].__cause__, one["exception"].__context__]
            assert any(isinstance(error, NotImplementedError) for error in chain), one["check_name"]


# -- loading ----------------------------------------------------------------------------------------------------------


def test_one_function_returns_the_right_kind(tmp_path: Path) -> None:
    path = train(tmp_path, BINARY, classes=CLASSES).path
    model = load_model(str(path))
    assert isinstance(model, VeilBoostClassifier)
    assert model.n_features_in_ == 6
    assert model.feature_names_in_.tolist() == NAMES
    assert model.classes_.tolist() == ["ja", "nein"]
    assert np.array_equal(VeilBoostClassifier.load(path).predict(frame()), model.predict(frame()))
    with pytest.raises(ScoringError, match="predicts classes: use VeilBoostClassifier"):
        VeilBoostRegressor.load(path)
    number = train(tmp_path, {"objective": "count:poisson"}).path
    assert isinstance(load_model(number), VeilBoostRegressor)
    with pytest.raises(ScoringError, match="predicts numbers: use VeilBoostRegressor"):
        VeilBoostClassifier.load(number)


def test_nothing_is_trained(tmp_path: Path) -> None:
    model = load_model(train(tmp_path, BINARY).path)
    with pytest.raises(NotImplementedError, match=r"sklearn\.frozen\.FrozenEstimator"):
        model.fit(frame(), np.zeros(300))
    for method in ("predict", "predict_proba"):
        with pytest.raises(NotFittedError, match="holds no model yet"):
            getattr(clone(model), method)(frame())


@pytest.mark.parametrize("classes", [["no", "yes"], ["yes", "no"], [1, 0], [5, "a"]])
def test_scorers_find_the_positive_class_in_whatever_order_it_was_declared(tmp_path: Path, classes: list[Any]) -> None:
    trained = train(tmp_path, BINARY, classes=classes)
    model = load_model(trained.path)
    names = np.array(classes) if isinstance(classes[1], int) else np.array([str(one) for one in classes])
    truth = names[trained.matrix.get_label().astype(int)]
    assert model.classes_.tolist() == sorted(names.tolist())
    assert get_scorer("roc_auc")(model, trained.rows, truth) == roc_auc_score(
        trained.matrix.get_label(), trained.booster.predict(trained.matrix)
    )
    assert get_scorer("accuracy")(model, trained.rows, truth) > 0.8
    largest = model.classes_[model.predict_proba(trained.rows).argmax(axis=1)]
    assert np.array_equal(model.predict(trained.rows), largest)


def test_it_pickles_and_stands_in_pipelines(tmp_path: Path) -> None:
    trained = train(tmp_path, BINARY, classes=CLASSES)
    model, rows = load_model(trained.path), trained.rows
    wanted = model.predict_proba(rows)
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict_proba(rows), wanted)  # noqa: S301
    pipeline = make_pipeline(FunctionTransformer(lambda table: table.iloc[:, ::-1]), model)
    assert np.array_equal(pipeline.predict_proba(rows), wanted)
    label = np.array(CLASSES)[label_of(positions(rows), 2)]
    frozen = FrozenEstimator(model)
    assert clone(frozen).predict(rows).tolist() == model.predict(rows).tolist()
    assert make_pipeline(FunctionTransformer(), frozen).fit(rows, label).score(rows, label) > 0.8
    calibrated = CalibratedClassifierCV(frozen, method="isotonic").fit(rows, label)
    assert calibrated.classes_.tolist() == ["ja", "nein"]
    assert calibrated.score(rows, label) > 0.8
    assert (cross_val_score(frozen, rows, label, cv=3) > 0.7).all()
    with pytest.raises(NotImplementedError):
        cross_val_score(model, rows, label, cv=3, error_score="raise")


# -- tables -----------------------------------------------------------------------------------------------------------


def forms(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the same rows in the forms in which tables come."""
    typed = rows.assign(colour=rows.colour.astype("category"), size=rows["size"].astype("category"))
    turned = rows.assign(colour=pd.Categorical(rows.colour, categories=[*COLOURS[::-1], "unused"]))
    return {
        "words": rows,
        "categories": typed,
        "categories in another order": turned,
        "columns in another order": rows[NAMES[::-1]],
        "objects": rows.astype(object),
        "numbers as text": rows.assign(size=rows["size"].astype(str), flag=rows.flag.astype(str)),
        "whole numbers with a fraction": rows.assign(size=rows["size"].astype(float)),
        "mixed types": rows.assign(size=[str(s) if i % 2 else s for i, s in enumerate(rows["size"])]),
        "Arrow": pa.Table.from_pandas(rows),
        "types of Arrow": rows.convert_dtypes(dtype_backend="pyarrow"),
        "nullable types": rows.convert_dtypes(),
        "array of objects": rows.to_numpy(object),
    }


@pytest.mark.parametrize("form", forms(frame(2)))
@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
def test_rows_may_come_in_any_form(tmp_path: Path, form: str) -> None:
    trained = train(tmp_path, BINARY)
    table = forms(trained.rows)[form]
    if form == "types of Arrow":
        assert str(table.dtypes["size"]) == "int64[pyarrow]"
    found = load_model(trained.path).predict_proba(table)[:, 1]
    assert np.array_equal(found, trained.booster.predict(trained.matrix))


@pytest.mark.parametrize("n_rows", [0, 1])
def test_no_rows_and_one_row(tmp_path: Path, n_rows: int) -> None:
    two = load_model(train(tmp_path, BINARY, classes=CLASSES).path)
    rows = frame().iloc[:n_rows]
    assert two.predict(rows).shape == (n_rows,)
    assert two.predict_proba(rows).shape == (n_rows, 2)
    three = load_model(train(tmp_path, {"objective": "multi:softprob", "num_class": 3}).path)
    assert three.predict_proba(rows).shape == (n_rows, 3)
    assert load_model(train(tmp_path, {"objective": "reg:gamma"}, np.ones(300)).path).predict(rows).shape == (n_rows,)


def test_an_array_of_numbers_goes_by_position_and_says_so(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(100, 2))
    matrix = xgb.DMatrix(values.astype(np.float32), label=values[:, 0] > 0, feature_names=["a", "b"])
    booster = xgb.train({**BINARY, "nthread": 1}, matrix, 2)
    booster.save_model(tmp_path / "m.json")
    model = load_model(tmp_path / "m.json")
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        assert np.array_equal(model.predict_proba(values)[:, 1], booster.predict(matrix))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(pd.DataFrame(values, columns=["a", "b"]))
    with pytest.raises(TypeError, match="Sparse data"):
        model.predict(sparse.csr_array(values))


def test_positions_in_the_place_of_words_are_refused(tmp_path: Path) -> None:
    model = load_model(train(tmp_path, BINARY).path)
    with pytest.raises(ScoringError, match=r"column 'colour': \d+ of 300 values are none of the model's 3 categories"):
        model.predict(pd.DataFrame(positions(frame()), columns=NAMES))


def wrong_tables() -> dict[str, tuple[pd.DataFrame, str]]:
    rows = frame()
    large = rows.assign(**{NAMES[0]: 1e39})
    dates = rows.assign(flag=pd.Timestamp("2026-01-01"))
    return {
        "lacking": (rows.drop(columns=NAMES[:2]), r"X lacks 2 of the model's 6 columns \('Größe \(cm\)', '身長'\)"),
        "almost": (rows.rename(columns={"colour": "color"}), "did you mean 'color'"),
        "alike": (rows.rename(columns={"colour": "\uff43olour"}), "looks alike and is written with other characters"),
        "extra": (rows.assign(Kunde=1), r"X has 1 column that the model lacks \('Kunde'\): drop what is no feature"),
        "twice": (pd.concat([rows, rows.flag], axis=1), r"X has 1 name of columns twice \('flag'\)"),
        "unknown": (rows.assign(colour=["lila", *rows.colour[1:]]), "1 of 300 values are none of the model's 3 categ"),
        "text": (rows.assign(flag=["perhaps", *rows.flag[1:]]), "'flag': 1 of 300 values are text that is no number"),
        "large": (large, "300 of 300 values are infinite or beyond float32"),
        "dates": (dates, "'flag': its 300 values are of type timestamp"),
        "many": (rows.assign(flag="x", size=99), r"'size': 300 of 300 .*; column 'flag': 300 of 300"),
    }


@pytest.mark.parametrize("case", wrong_tables())
def test_what_does_not_fit_is_counted_and_not_shown(tmp_path: Path, case: str) -> None:
    model = load_model(train(tmp_path, BINARY).path)
    table, words = wrong_tables()[case]
    with pytest.raises(ScoringError, match=words) as error:
        model.predict(table)
    assert isinstance(error.value, ValueError)
    assert all(value not in str(error.value) for value in ("lila", "perhaps", "1e+39"))


def test_unknown_categories_count_as_missing_if_asked(tmp_path: Path) -> None:
    path = train(tmp_path, BINARY).path
    rows = frame().assign(colour="lila")
    found = load_model(path, unknown_is_missing=True).predict_proba(rows)
    assert np.array_equal(found, load_model(path).predict_proba(rows.assign(colour=None)))


def test_names_that_no_matrix_of_xgboost_takes_are_columns_all_the_same(tmp_path: Path) -> None:
    trained = train(tmp_path, BINARY)
    wanted, names = load_model(trained.path).predict_proba(trained.rows), ["a[0]", "b<c", "d]", "colour", "size", "\t"]
    changed(trained.path, lambda document: document["learner"].update(feature_names=names))
    found = load_model(trained.path).predict_proba(trained.rows.set_axis(names, axis=1)[names[::-1]])
    assert np.array_equal(found, wanted)


def test_another_threshold_is_scikit_learns_to_set(tmp_path: Path) -> None:
    trained = train(tmp_path, BINARY, classes=CLASSES)
    model, label = load_model(trained.path), np.array(CLASSES)[trained.matrix.get_label().astype(int)]
    strict = FixedThresholdClassifier(FrozenEstimator(model), threshold=0.8, pos_label="ja").fit(trained.rows, label)
    found = strict.predict(trained.rows) == "ja"
    assert np.array_equal(found, model.predict_proba(trained.rows)[:, 0] >= 0.8)
    assert 0 < found.sum() < (model.predict(trained.rows) == "ja").sum()


def test_text_that_is_none_is_no_category(tmp_path: Path) -> None:
    """Half a pair of surrogates, which pandas' own texts do not take, in an array and in a frame."""
    model = load_model(train(tmp_path, {"objective": "binary:logistic"}, classes=CLASSES).path)
    rows = frame(4).astype(object)
    rows.iloc[2, NAMES.index("colour")] = "\ud800"
    for given in (rows, rows.to_numpy(dtype=object)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            with pytest.raises(ScoringError, match=r"column 'colour': 1 of 4 values are none of the model's"):
                model.predict(given)


# -- fitted to a federation, explained, dated -------------------------------------------------------------------------


def numbers() -> tuple[pd.DataFrame, xgb.XGBClassifier]:
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"day": rng.integers(15_000, 20_000, 300), "size": rng.normal(size=300), "no": 0.0})
    label = ((rows["day"] > 17_500) ^ (rows["size"] > 0)).astype(int)
    return rows, xgb.XGBClassifier(n_estimators=5, max_depth=3, n_jobs=1).fit(rows, label)


def as_ours(stock: xgb.XGBClassifier, **how: Any) -> VeilBoostClassifier:
    model = FinishedModel(bytes(stock.get_booster().save_raw("json")), "model.json")
    return VeilBoostClassifier(**how)._with(model)


def test_importances_are_those_of_xgboost_and_explanations_add_up_to_the_margin() -> None:
    rows, stock = numbers()
    ours = as_ours(stock)
    np.testing.assert_allclose(ours.feature_importances_, stock.feature_importances_, rtol=1e-5)
    assert ours.feature_importances_[2] == 0
    shown = ours.explain(rows.set_index(rows.index + 7))
    assert list(shown.columns) == ["shap.day", "shap.size", "shap.no", "shap_bias"] and shown.index[0] == 7
    np.testing.assert_allclose(shown.sum(axis=1), stock.predict(rows, output_margin=True), atol=1e-5)


def test_dates_are_read_as_trained_on() -> None:
    rows, stock = numbers()
    expected = as_ours(stock).predict_proba(rows)
    declared = rows.assign(day=pd.to_datetime(rows["day"], unit="D"))
    texts = rows.assign(day=declared["day"].dt.strftime("%d.%m.%Y"))
    assert np.array_equal(as_ours(stock, dates={"day": "YYYY-MM-DD"}).predict_proba(declared), expected)
    assert np.array_equal(as_ours(stock, dates={"day": "DD.MM.YYYY"}).predict_proba(texts), expected)
    with pytest.raises(ScoringError, match="no date of the pattern"):
        as_ours(stock, dates={"day": "YYYY-MM-DD"}).predict_proba(texts)
    gone = texts.assign(day=[None, *texts["day"][1:]])
    missing = rows.assign(day=[np.nan, *rows["day"][1:]])
    dated = as_ours(stock, dates={"day": "DD.MM.YYYY"})
    assert np.array_equal(dated.predict_proba(gone), as_ours(stock).predict_proba(missing))


def test_a_notebook_shows_what_moves_the_model_and_escapes_names() -> None:
    rows, _ = numbers()
    stock = xgb.XGBClassifier(n_estimators=2, n_jobs=1).fit(rows.rename(columns={"size": "a&b"}), rows["day"] > 17_500)
    html = as_ours(stock)._repr_html_()
    assert "<svg" in html and "importance by gain" in html
    assert "<svg" not in VeilBoostClassifier()._repr_html_().partition("importance")[2]


def test_fit_takes_a_federation_and_no_table() -> None:
    rows, stock = numbers()

    class Federation:
        def train(self, method: Any = None, *, rounds: int = 10) -> Any:
            self.asked = (method, rounds)
            return type("Run", (), {"model": as_ours(stock)})

    fed, estimator = Federation(), VeilBoostClassifier()
    assert estimator.fit(fed, rounds=3) is estimator and fed.asked == (None, 3)
    assert np.array_equal(estimator.predict_proba(rows), as_ours(stock).predict_proba(rows))
    for table in ((rows, rows["day"]), (rows, None), (fed, rows["day"])):
        with pytest.raises(NotImplementedError, match="fit it to a federation"):
            VeilBoostClassifier().fit(*table)
    with pytest.raises(ScoringError, match="predicts classes"):
        VeilBoostRegressor().fit(fed)


# -- figures of what a model makes of a site's rows --------------------------------------------------------------------


NAMES_OF = {"binary:logistic": ("well", "ill"), "multi:softprob": ("a", "b", "c")}


def trained(folder: Path, objective: str) -> tuple[bytes, Table]:
    names = NAMES_OF.get(objective)
    random = np.random.default_rng(2)
    frame = pd.DataFrame({"x": random.random(300), "town": random.choice(["Ulm", "Kiel"], 300)})
    score = frame.x + 0.3 * (frame.town == "Ulm")
    frame["y"] = score if names is None else np.array(names)[(score * len(names) / 1.31).astype(int)]
    frame.to_csv(folder / "rows.csv", index=False)
    lists = {"town": ("Ulm", "Kiel")}
    table = load_table(
        DataSet(name="rows", path=folder / "rows.csv", format="csv"), label="y", categories=lists, label_classes=names
    )
    params = {"objective": objective, "nthread": 1, "max_depth": 3, "num_class": 3 if len(names or ()) == 3 else None}
    columns = {"feature_names": list(table.feature_names), "feature_types": list(table.feature_types)}
    matrix = xgb.DMatrix(table.features, table.label, **columns, enable_categorical=True)
    booster = xgb.train({key: value for key, value in params.items() if value is not None}, matrix, 3)
    return with_lists(bytes(booster.save_raw("json")), table.feature_names, lists, names), table


@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob", "reg:squarederror"])
def test_figures_are_of_all_rows_under_the_names_of_the_classes(tmp_path: Path, objective: str) -> None:
    content, table = trained(tmp_path, objective)
    model = FinishedModel(content, "model")
    found = row_figures(model, table, scores_of(model, table.features))
    assert "town Ulm: " in found.swarm and re.search("town = (Ulm|Kiel)", found.row)
    if objective == "binary:logistic":
        assert found.classes is not None and sum(found.classes.thresholds[0][2]) == 300
        assert found.classes.name == "ill" and found.words.endswith("margin of ill.")
    elif objective == "multi:softprob":
        assert [name for name, _ in found.confusion] == ["a", "b", "c"]
        assert [sum(counts) for _, counts in found.confusion] == np.bincount(table.label.astype(int)).tolist()
        assert all(max(counts) == counts[place] for place, (_, counts) in enumerate(found.confusion))
    else:
        assert found.classes is None and not found.confusion and found.words.endswith("of the prediction.")


def test_a_model_that_cannot_be_explained_still_has_curves(tmp_path: Path) -> None:
    content, table = trained(tmp_path, "binary:logistic")
    model = FinishedModel(strip_sum_hessian(content), "model")
    found = row_figures(model, table, scores_of(model, table.features))
    assert found.classes is not None and not found.swarm and not found.row and "cannot be explained" in found.words
