"""One small job of each kind, with data: what the conformance suite runs. A new kind adds its data and fields here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nvflare_plugins.flare.kinds import KINDS
from nvflare_plugins.recipes import recipe as recipes
from nvflare_plugins.recipes.recipe import JobRecipe
from tests.golden.jobs import (
    BUDGET,
    MODELS,
    PURE_BUDGET,
    bounds_of,
    breast,
    columns_over_sites,
    describe_buckets,
    rows_over_sites,
)
from tests.support.federation import Parties

DATA = "rows"
_SHALLOW = {"objective": "binary:logistic", "max_depth": 2, "max_bin": 16}


@dataclass(frozen=True)
class KindCase:
    """A job of one kind.

    Attributes:
        recipe: (name of the FLARE job, fields of the job, ``sites``, ``min_clients``) -> its recipe.
        least: the fields that every job of this kind must have, one valid value for each.
        fields: those of the job that is run.
        give: makes the sites below a folder, with data and policies; the data set is called ``DATA``.
        results: files in which a site's part of the result may be; none of them may be there after an abort.
    """

    recipe: Callable[..., JobRecipe]
    least: Mapping[str, Any]
    fields: Mapping[str, Any]
    give: Callable[[Path], Parties]
    results: tuple[str, ...] = ("model.json",)


def _bounded(frame_of: Callable[..., Any] = breast) -> dict[str, Any]:
    return {"feature_bounds": bounds_of(frame_of(4))}


def _rows(folder: Path) -> Parties:
    return rows_over_sites(folder, breast(4), DATA)


def _shared_trees(folder: Path) -> Parties:
    parties = _rows(folder)
    # The smallest site has 95 rows, and grows its trees on these alone.
    return _consenting(parties, {"share_own_trees": True}, min_effective_rows=50)


def _consenting(parties: Parties, consents: dict[str, object], **policy: object) -> Parties:
    """Have every site consent to this too."""
    for site in parties.sites:
        parties.set_policy(site, consents={**parties.policy_of(site).get("consents", {}), **consents}, **policy)
    return parties


def _counted_rows(folder: Path) -> Parties:
    return _consenting(_rows(folder), {"feature_profile": True})


def _four_times(n_columns: int) -> pd.DataFrame:
    """Return enough rows for two folds: the real ones, each four times with other small errors."""
    frame, random = breast(n_columns), np.random.default_rng(0)
    features = frame.columns.drop("y")
    parts = [frame.assign(**{n: frame[n] * random.normal(1, 0.01, len(frame)) for n in features}) for _ in range(4)]
    return pd.concat(parts, ignore_index=True)


def _many_rows(folder: Path) -> Parties:
    parties = rows_over_sites(folder, _four_times(4), DATA)
    return _consenting(parties, {"tuning": 100, "feature_profile": True})


def _many_columns(folder: Path) -> Parties:
    return _consenting(columns_over_sites(folder, _four_times(6), DATA), {"tuning": 100})


def _private_rows(folder: Path) -> Parties:
    return rows_over_sites(folder, breast(4), DATA, privacy=BUDGET)


def _private_named_rows(folder: Path) -> Parties:
    frame = breast(4)
    named = frame.assign(id=[f"row-{number}" for number in range(len(frame))])
    return rows_over_sites(folder, named, DATA, id="id", privacy=PURE_BUDGET)


def _columns(folder: Path) -> Parties:
    return columns_over_sites(folder, breast(6)[:200], DATA)


def _shuffled_columns(folder: Path) -> Parties:
    return columns_over_sites(folder, breast(6)[:120], DATA, shuffled=True)


def _described_columns(folder: Path) -> Parties:
    parties = columns_over_sites(folder, breast(6)[:200], DATA)
    describe_buckets(parties, breast(6), DATA)
    return parties


def _trained_columns(folder: Path) -> Parties:
    parties = columns_over_sites(folder, breast(6)[:40], DATA)
    for site in parties.sites:
        part = json.loads((MODELS / "vertical_plain" / f"{site}.json").read_bytes())
        parties.give_input(site, f"{part['job_id']}.{site}.json", part)
    return parties


def recipe_of_kind(kind: str) -> Callable[..., JobRecipe]:
    """Return the recipe of a kind's name, or for a kind without one that of any job."""

    def of_job(name: str, *, sites: Any = None, min_clients: int | None = None, **fields: Any) -> JobRecipe:
        return JobRecipe(name, KINDS[kind].job.from_dict(fields), sites, min_clients)

    return next((one for one in vars(recipes).values() if getattr(one, "kind", None) == kind), of_job)


def _case(kind: str, give: Callable[[Path], Parties], least: Mapping[str, Any], **rest: Any) -> KindCase:
    run = rest.pop("run", {})
    return KindCase(recipe_of_kind(kind), least, {**least, **run}, give, **rest)


_LABELLED = {"data_set": DATA, "label": "y"}

CASES: dict[str, KindCase] = {
    "alignment": _case("alignment", _shuffled_columns, {"data_sets": [DATA]}, results=("alignment.npz",)),
    "bagging": _case("bagging", _shared_trees, _LABELLED, run={"params": _SHALLOW, "num_rounds": 3}),
    "dpboost": _case(
        "dpboost",
        _private_named_rows,
        {**_LABELLED, "epsilon": 4.0, **_bounded()},
        run={"n_trees": 2, "trees_per_ensemble": 2, "depth": 2, "n_candidates": 4},
    ),
    "federboost_vertical": _case(
        "federboost_vertical",
        _described_columns,
        {**_LABELLED, "active": "site-1"},
        run={"params": {"objective": "binary:logistic", "max_depth": 2}, "num_rounds": 2, "epsilon": 4.0},
        results=("vertical_model.json", "private_table.json"),
    ),
    "horizontal": _case("horizontal", _rows, _LABELLED, run={"params": _SHALLOW, "num_rounds": 2, "tracking": False}),
    "private_trees": _case(
        "private_trees",
        _private_rows,
        {**_LABELLED, "epsilon": 1.0, "delta": 1e-6, **_bounded()},
        run={"components": {"n_trees": 2}},
    ),
    "profile": _case(
        "profile", _counted_rows, _LABELLED, run={"max_bin": 16}, results=("profile.json", "profile.html")
    ),
    "selection": _case(
        "selection",
        _many_rows,
        _LABELLED,
        run={"params": _SHALLOW, "folds": 2, "num_rounds": 2, "min_features": 3},
        results=("selection.json", "selection.csv", "selection_steps.csv", "selection.html", "train_chosen.py"),
    ),
    "tuning": _case(
        "tuning",
        _many_rows,
        {**_LABELLED, "trials": [{"max_depth": 2}]},
        run={"params": {"objective": "binary:logistic", "max_bin": 16}, "folds": 2, "num_rounds": 2},
        results=("tuning.json", "tuning.csv", "tuning.html", "train_best.py"),
    ),
    "vertical": _case(
        "vertical",
        _columns,
        {**_LABELLED, "active": "site-1"},
        run={"params": _SHALLOW, "num_rounds": 2, "profile": "plain", "preset": "exact"},
        results=("vertical_model.json", "private_table.json"),
    ),
    "vertical_tuning": _case(
        "vertical_tuning",
        _many_columns,
        {**_LABELLED, "active": "site-1", "trials": [{"max_depth": 2}]},
        run={
            "params": {"objective": "binary:logistic", "max_bin": 16},
            "folds": 2,
            "num_rounds": 1,
            "profile": "plain",
        },
        results=("tuning.json", "tuning.csv", "tuning.html", "train_best.py"),
    ),
    "vertical_inference": _case(
        "vertical_inference",
        _trained_columns,
        {"model": "golden", "data_set": DATA},
        run={"file_format": "csv", "batch_rows": 10},
        results=("predictions.csv",),
    ),
}
ONE_OF_EACH = ("bagging", "dpboost", "horizontal", "private_trees", "vertical")
"""Kinds that train in ways of their own; what is the same in all kinds is tried on these in the quick suite."""
