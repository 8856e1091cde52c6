"""Growing trees in tests: the settings of the oracle, with the grower in XGBoost's place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.growth._native import BEST
from nvflare_plugins.growth.arithmetic import Arithmetic, GradientUnit, TreeParameters
from nvflare_plugins.growth.bins import BinLayout, bin_rows
from nvflare_plugins.growth.rows import BinnedRows, NodeSplit
from nvflare_plugins.growth.sampling import TreeRandom, sampled_rows
from nvflare_plugins.growth.tree import Tree, TreeGrower
from nvflare_plugins.xgb.cuts import Cuts
from tests.oracle import growth_trees
from tests.oracle.growth_trees import Setting

F = np.float32
_REALS = {
    "reg_lambda": 1,
    "reg_alpha": 0,
    "min_split_loss": 0,
    "min_child_weight": 1,
    "max_delta_step": 0,
    "subsample": 1,
    "colsample_bytree": 1,
    "colsample_bylevel": 1,
    "colsample_bynode": 1,
}


def tree_parameters(params: dict[str, Any]) -> TreeParameters:
    """Return what decides the growth of trees, of XGBoost's parameters with its defaults."""
    reals = _REALS | {("min_split_loss" if name == "gamma" else name): value for name, value in params.items()}
    groups = params.get("interaction_constraints")
    return TreeParameters(
        **{name: F(reals[name]) for name in _REALS},
        max_depth=params.get("max_depth", 6),
        max_leaves=params.get("max_leaves", 0),
        lossguide=params.get("grow_policy") == "lossguide",
        monotone=tuple(json.loads(params.get("monotone_constraints", "()").replace("(", "[").replace(")", "]"))),
        interactions=tuple(map(frozenset, json.loads(groups))) if groups else None,
        max_cat_to_onehot=params.get("max_cat_to_onehot", 4),
        max_cat_threshold=params.get("max_cat_threshold", 64),
    )


class SeveralSites:
    """The rows of several sites as those of one; sums are added by ``Recorder``, from all of them."""

    def __init__(self, sites: Sequence[BinnedRows], rows: Sequence[NDArray[np.intp]]) -> None:
        self.sites, self.rows = sites, rows

    def begin_tree(self, pairs: NDArray[np.int64]) -> None:
        for site, rows in zip(self.sites, self.rows, strict=True):
            site.begin_tree(pairs[rows])

    def total(self) -> NDArray[np.int64]:
        return sum((site.total() for site in self.sites), np.zeros(2, dtype=np.int64))

    def histograms(self, nodes: Sequence[int]) -> NDArray[np.int64]:
        return np.sum([site.histograms(nodes) for site in self.sites], axis=0)

    def apply(self, splits: Sequence[NodeSplit]) -> None:
        for site in self.sites:
            site.apply(splits)

    def node_of_rows(self) -> NDArray[np.int32]:
        found = np.empty(sum(rows.size for rows in self.rows), dtype=np.int32)
        for site, rows in zip(self.sites, self.rows, strict=True):
            found[rows] = site.node_of_rows()
        return found


class Recorder:
    """Sums over one site: hands back what it gets, and counts."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def add(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        self.sizes.append(values.size)
        return values


def layout_of(setting: Setting, arithmetic: Arithmetic) -> BinLayout:
    return BinLayout.from_cuts(Cuts(tuple(growth_trees.cut_points(setting))), setting.categories, arithmetic)


def grow(
    setting: Setting,
    arithmetic: Arithmetic,
    variant: str = BEST,
    parts: Sequence[NDArray[np.intp]] | None = None,
    sums: Recorder | None = None,
) -> Iterator[Tree]:
    """Grow a setting's trees.

    Args:
        parts: the rows of each site; None for one site.
    """
    xgb_params, table = growth_trees.parameters(setting), growth_trees.features(setting)
    params, layout = tree_parameters(xgb_params), layout_of(setting, arithmetic)
    parts = [np.arange(setting.n_rows)] if parts is None else parts
    sites = [BinnedRows(layout, bin_rows(layout, [table[p]], p.size, variant), variant) for p in parts]
    rows = SeveralSites(sites, parts)
    grower = TreeGrower(layout, params, arithmetic, F(xgb_params["eta"]), variant)
    per_iteration = bool(xgb_params.get("seed_per_iteration", False))
    random = TreeRandom(params, setting.n_features, arithmetic, growth_trees.SEED, per_iteration=per_iteration)
    margins: NDArray[np.float32] = np.zeros(setting.n_rows, dtype=np.float32)
    unit = GradientUnit(-growth_trees.GRID_BITS, -growth_trees.GRID_BITS)
    for number in range(setting.n_trees):
        random.begin_round(number)
        pairs = growth_trees.pairs(setting, number, table, margins)
        if params.subsample < 1:
            pairs = pairs * sampled_rows(setting.n_rows, params.subsample, random.row_seed())[:, None]
        rows.begin_tree(pairs)
        random.columns.begin_tree()
        tree = grower.grow(rows, (sums or Recorder()).add, unit, random.columns)
        margins += tree.conditions[rows.node_of_rows()]
        yield tree


def fields(tree: Tree) -> dict[str, Any]:
    """Return a tree in the fields of XGBoost's document: float32 as numbers."""
    return {name: np.asarray(values).tolist() for name, values in tree.fields().items()}


def as_float32(document: dict[str, Any]) -> dict[str, Any]:
    """Return XGBoost's fields with the numbers that its decimals stand for."""
    reals = ("split_conditions", "base_weights", "loss_changes", "sum_hessian")
    return document | {name: np.array(document[name], dtype=F).tolist() for name in reals}
