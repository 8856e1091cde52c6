"""What a horizontal job says. Where the data lie and what is allowed, each site's own policy says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.checks import (
    are_bounds,
    at_least,
    check_fields,
    expect,
    is_entry,
    is_list,
    is_mapping,
    is_text,
    one_of,
    seconds,
)
from nvflare_plugins.wire.profiles import Profile, plugin_of
from nvflare_plugins.xgb.cuts import CutMode

_LARGEST_EXPONENT = 192  # as the scales of sums


@dataclass(frozen=True, slots=True)
class HorizontalJob:
    """One horizontal training: same columns at every site, other rows.

    Attributes:
        data_set: name of the training set in every site's policy.
        label: label column.
        params: XGBoost parameters (jobs/README.md lists the supported ones).
        num_rounds: boosting rounds.
        profile: `masks`, `bfv`, `ckks` or `plain`; or `plugin.NAME`, a plugin that every site's policy names
            (`plugins`).
        eval_data_set: name of an evaluation set in every site's policy; evaluated after each round.
        evaluate_training: evaluate the training set too, which costs one exchange per metric and round.
        weight: column of sample weights. Another one over the same rows counts as changed rows at the sites'
            registries.
        features: columns to train on, in this order; None means all columns of the file but label and weight.
        categories: public category list of each categorical column.
        unknown_category_is_missing: treat other categories as missing instead of refusing the data.
        label_classes: public list of label values; None means that labels are numbers (classes 0 .. k-1).
        cuts: how the histogram's cut points are agreed: `quantile`, `exact`, `uniform` or `logarithmic`.
        cut_bounds: public (low, high) of each feature, for `uniform` and `logarithmic`.
        min_rows_per_cut: `quantile` stops where fewer pooled rows would be singled out.
        early_stopping_rounds: stop after so many rounds without improvement of the last metric on the last set.
        checkpoint_every: rounds between checkpoints at the site; 0 keeps none.
        initial_model: name of a model file in every site's input folder that training continues by num_rounds.
        resume_from: id of an interrupted job; its last common checkpoint is continued up to num_rounds in total. All
            other fields stay as they were in that job, initial_model included. Without sampling of columns or dropped
            trees the model is that of an uninterrupted job; random draws of these are not those it would have made.
        tracking: stream the pooled metrics of each round to the server.
        finest_exponent: no grid of sums is finer than 2^finest_exponent; set it to compare profiles bit for bit.
        deadline_s: longest time that an exchange may wait for the slowest site; 0 derives it from the data's size.
    """

    data_set: str
    label: str
    params: dict[str, Any] = field(default_factory=dict)
    num_rounds: int = 10
    profile: str = Profile.MASKS.value
    eval_data_set: str | None = None
    evaluate_training: bool = False
    weight: str | None = None
    features: list[str] | None = None
    categories: dict[str, list[Any]] = field(default_factory=dict)
    unknown_category_is_missing: bool = False
    label_classes: list[Any] | None = None
    cuts: str = CutMode.QUANTILE.value
    cut_bounds: dict[str, list[float]] = field(default_factory=dict)
    min_rows_per_cut: int = 10
    early_stopping_rounds: int | None = None
    checkpoint_every: int = 10
    initial_model: str | None = None
    resume_from: str | None = None
    tracking: bool = True
    finest_exponent: int | None = None
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        self._check_texts()
        if not (isinstance(self.profile, str) and plugin_of(self.profile)):
            one_of("profile", self.profile, [*(p.value for p in Profile), "plugin.NAME"])
        one_of("cuts", self.cuts, [m.value for m in CutMode])
        expect("params must be a dictionary of XGBoost parameters", is_mapping(self.params))
        at_least("num_rounds", self.num_rounds, 1)
        at_least("min_rows_per_cut", self.min_rows_per_cut, 2)
        at_least("checkpoint_every", self.checkpoint_every, 0)
        for name in ("evaluate_training", "unknown_category_is_missing", "tracking"):
            expect(f"{name} must be true or false", isinstance(getattr(self, name), bool))
        finest = self.finest_exponent
        in_range = finest is None or (type(finest) is int and abs(finest) <= _LARGEST_EXPONENT)
        expect(f"finest_exponent must be a whole number of at most {_LARGEST_EXPONENT} in magnitude", in_range)
        seconds("deadline_s", self.deadline_s)
        if self.early_stopping_rounds is not None:
            at_least("early_stopping_rounds", self.early_stopping_rounds, 1)
            if self.eval_data_set is None:
                raise ConfigurationError("early_stopping_rounds needs an eval_data_set to watch")
        self._check_columns()
        self._check_params()

    def _check_texts(self) -> None:
        for name in ("data_set", "label"):
            expect(f"{name} must be a non-empty text", is_text(getattr(self, name)))
        for name in ("eval_data_set", "weight", "initial_model", "resume_from"):
            value = getattr(self, name)
            expect(f"{name} must be a non-empty text, or be left out", value is None or is_text(value))

    def _check_columns(self) -> None:
        features, classes = self.features, self.label_classes
        expect("features must be a list of column names", features is None or is_list(features, is_text))
        expect("label_classes must be a list of texts or whole numbers", classes is None or is_list(classes, is_entry))
        expect(
            "categories must give each column a list of texts or whole numbers",
            is_mapping(self.categories) and all(is_list(entries, is_entry) for entries in self.categories.values()),
        )
        expect(
            "cut_bounds must give each column two finite numbers, the lower one first",
            is_mapping(self.cut_bounds) and all(map(are_bounds, self.cut_bounds.values())),
        )
        if self.cuts in (CutMode.UNIFORM.value, CutMode.LOGARITHMIC.value) and not self.cut_bounds:
            raise ConfigurationError(f"cuts={self.cuts} needs cut_bounds, the public bounds of every feature")

    def _check_params(self) -> None:
        """Refuse what XGBoost would refuse in the middle of the job; the rest is checked with the columns at hand."""
        if self.params.get("max_bin") == 2:
            raise ConfigurationError("max_bin=2 leaves no cut point inside the outermost two; give max_bin 3 or more")
        if self.params.get("multi_strategy") == "multi_output_tree" and self.categories:
            raise ConfigurationError(
                "multi_strategy=multi_output_tree takes no categories in XGBoost 3.2; leave multi_strategy out, or "
                "give the categorical columns as numbers"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> HorizontalJob:
        """Read a job strictly.

        Raises:
            ConfigurationError: unknown or missing fields, or a value that is not allowed.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**check_fields(document, known, ("data_set", "label")))
