"""What a bagging job says. Where the data lie and what is allowed, each site's own policy says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from he_processors.errors import ConfigurationError
from nvflare_plugins.checks import at_least, check_fields, expect, is_entry, is_list, is_mapping, is_text, seconds
from nvflare_plugins.xgb.parameters import TrainingParameters, check_parameters

PROFILE = "own_trees"  # the one way in which this job protects trees; the evidence names it
MOST_DEPTH = 12
BASE_SCORE = 0.5
_SINGLE = {"num_parallel_tree": 1, "subsample": 1.0, "booster": "gbtree", "multi_strategy": "one_output_per_tree"}


@dataclass(frozen=True, slots=True)
class BaggingJob:
    """One training by tree-based bagging: same columns at every site, other rows.

    Attributes:
        data_set: name of the training set in every site's policy.
        label: label column.
        params: XGBoost parameters, as for horizontal jobs, but for objectives with one output and a bounded hessian,
            every row, and trees of depth 1 to 12. Each tree counts 1/W of ``learning_rate``, W the number of sites.
            ``base_score`` is public, 0.5 unless given: there is no exchange that would estimate it.
        num_rounds: rounds; each adds one tree of every site.
        features: columns to train on, in this order; None means all columns of the file but the label.
        label_classes: public list of label values; None means that labels are numbers.
        deadline_s: longest time that an exchange may wait for the slowest site; 0 derives it.
    """

    profile: ClassVar[str] = PROFILE
    tracking: ClassVar[bool] = False

    data_set: str
    label: str
    params: dict[str, Any] = field(default_factory=dict)
    num_rounds: int = 10
    features: list[str] | None = None
    label_classes: list[Any] | None = None
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("data_set", "label"):
            expect(f"{name} must be a non-empty text", is_text(getattr(self, name)))
        expect("params must be a dictionary of XGBoost parameters", is_mapping(self.params))
        at_least("num_rounds", self.num_rounds, 1)
        features, classes = self.features, self.label_classes
        expect("features must be a list of column names", features is None or is_list(features, is_text))
        expect("label_classes must be a list of texts or whole numbers", classes is None or is_list(classes, is_entry))
        seconds("deadline_s", self.deadline_s)

    def parameters(self, features: Sequence[str]) -> TrainingParameters:
        """Return the job's XGBoost parameters. Raises: ConfigurationError."""
        parameters = check_parameters({"base_score": BASE_SCORE, **self.params}, features)
        agreed, facts = parameters.agreed, parameters.objective
        for name, only in _SINGLE.items():
            if agreed.get(name, only) != only:
                raise ConfigurationError(f"bagging takes {name}={only} only: leave it out, or use a horizontal job")
        if facts.n_outputs != 1 or facts.hessian_bound is None or facts.adaptive_leaf:
            raise ConfigurationError(
                f"bagging does not take {facts.name}: a tree of one site must have one output, and leaves of at least "
                "so many rows, which needs a bounded hessian; use binary:logistic or reg:squarederror"
            )
        if not 1 <= int(parameters.effective["max_depth"]) <= MOST_DEPTH:
            raise ConfigurationError(f"bagging takes max_depth from 1 to {MOST_DEPTH}: messages have that tree's size")
        return parameters

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> BaggingJob:
        """Read a job strictly.

        Raises:
            ConfigurationError: unknown or missing fields, or a value that is not allowed.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**check_fields(document, known, ("data_set", "label")))
