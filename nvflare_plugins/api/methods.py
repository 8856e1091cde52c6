"""How to train: what is passed to ``fed.train``. What is left out is XGBoost's default, or the job's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast


class Method:
    """What every way to train has: a kind of job, XGBoost parameters and the job's fields, as far as they are given."""

    KIND: ClassVar[str]
    PARAMETERS: ClassVar[frozenset[str]] = frozenset()

    @property
    def params(self) -> dict[str, Any]:
        """What is given of XGBoost's parameters."""
        return {name: value for name, value in self._given().items() if name in self.PARAMETERS}

    @property
    def settings(self) -> dict[str, Any]:
        """What is given of the job's fields."""
        return {name: value for name, value in self._given().items() if name not in self.PARAMETERS}

    def _given(self) -> dict[str, Any]:
        values = ((each.name, getattr(self, each.name)) for each in dataclasses.fields(cast(Any, self)))
        return {name: value for name, value in values if value is not None}


@dataclass(frozen=True, kw_only=True)
class Trees(Method):
    """XGBoost parameters of federated trainings (jobs/MODEL.md), under XGBoost's own names."""

    objective: str | None = None
    """Chosen by the label where it is left out: two classes, several, or numbers."""
    eval_metric: str | Sequence[str] | None = None
    """The last one decides; chosen by the objective where it is left out."""
    max_depth: int | None = None
    learning_rate: float | None = None
    min_child_weight: float | None = None
    min_split_loss: float | None = None
    reg_lambda: float | None = None
    reg_alpha: float | None = None
    max_delta_step: float | None = None
    max_leaves: int | None = None
    max_bin: int | None = None
    grow_policy: str | None = None
    subsample: float | None = None
    colsample_bytree: float | None = None
    colsample_bylevel: float | None = None
    colsample_bynode: float | None = None
    monotone_constraints: Mapping[str, int] | None = None
    interaction_constraints: Sequence[Sequence[str]] | None = None
    scale_pos_weight: float | None = None
    base_score: float | None = None
    num_class: int | None = None
    num_parallel_tree: int | None = None
    max_cat_to_onehot: int | None = None
    max_cat_threshold: int | None = None
    lambdarank_pair_method: str | None = None
    lambdarank_num_pair_per_sample: int | None = None
    lambdarank_normalization: bool | None = None
    lambdarank_score_normalization: bool | None = None
    ndcg_exp_gain: bool | None = None
    seed: int | None = None


Trees.PARAMETERS = frozenset(each.name for each in dataclasses.fields(Trees))


@dataclass(frozen=True, kw_only=True)
class Horizontal(Trees):
    """Same columns at every site, other rows; every sum is masked or encrypted (``HorizontalXGBRecipe``)."""

    KIND: ClassVar[str] = "horizontal"

    features: Sequence[str] | None = None
    """Columns to train on; all that every site can use where it is left out."""
    categories: Mapping[str, Sequence[str]] | None = None
    """Public list of each categorical column; drafted from the sites' tables where it is left out."""
    unknown_category_is_missing: bool | None = None
    label_classes: Sequence[str | int] | None = None
    """Public list of the label's values; drafted where it is left out."""
    weight: str | None = None
    """Column of sample weights."""
    early_stopping_rounds: int | None = None
    """Needs evaluation rows: ``holdout`` or ``evaluation`` of the federation."""
    evaluate_training: bool | None = None
    """True where it is left out and there are no evaluation rows: it gives the learning curve."""
    pooled_metrics: bool | None = None
    cuts: str | None = None
    cut_bounds: Mapping[str, tuple[float, float]] | None = None
    compare_queries: bool | None = None
    min_rows_per_cut: int | None = None
    engine: str | None = None
    word_bits: int | None = None
    on_lost_site: str | None = None


@dataclass(frozen=True, kw_only=True)
class Vertical(Trees):
    """Same rows, other columns at each site; the one whose table has the label trains (``VerticalXGBRecipe``)."""

    KIND: ClassVar[str] = "vertical"

    id: str | None = None
    """Column that names the rows at every site: common ones are found by private set intersection. Without it all
    sites hold the same rows in the same order."""
    preset: str | None = None
    """guarded (default), exact, noised or sealed."""
    features: Mapping[str, Sequence[str]] | None = None
    """By site; all that each can use where it is left out."""
    categories: Mapping[str, Mapping[str, Sequence[str]]] | None = None
    """By site; drafted where it is left out."""
    unknown_category_is_missing: bool | None = None
    label_classes: Sequence[str | int] | None = None
    weight: str | None = None
    key_bits: int | None = None
    fraction_bits: int | None = None
    epsilon: float | None = None
    delta: float | None = None
    own_rounds: int | None = None
    early_stopping_rounds: int | None = None
    evaluate_training: bool | None = None
    on_lost_site: str | None = None


@dataclass(frozen=True, kw_only=True)
class Private(Method):
    """Trees under differential privacy (``PrivateTreesRecipe``). What is given here is public knowledge, never data."""

    KIND: ClassVar[str] = "private_trees"

    budget: tuple[float, float] | float
    """Epsilon and delta of this training, which each site's budget pays; epsilon alone for method pure."""
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Public (low, high) of every numeric feature."""
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Public list of each categorical feature."""
    label_classes: Sequence[str | int] | None = None
    label_bounds: tuple[float, float] | None = None
    """Public (low, high) of a label that is a number, or of times, above 0."""
    aft_loss_distribution: str | None = None
    aft_loss_distribution_scale: float | None = None
    method: str | None = None
    """A preset: default, few_rounds, pure (epsilon without a delta), or a paper's name such as dp_rf."""
    components: Mapping[str, Any] | None = None
    rows_per_person: int | None = None
    trust: str | None = None
    colluders: int | None = None

    @property
    def epsilon_and_delta(self) -> tuple[float, float]:
        """The budget; delta is 0 where it is an epsilon alone."""
        epsilon, delta = self.budget if isinstance(self.budget, tuple | list) else (self.budget, 0.0)
        return float(epsilon), float(delta)


vertical, private = Vertical, Private
"""The same under the names of functions."""
