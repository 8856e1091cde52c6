"""What a job of differentially private trees says. Everything in it is public: nothing may be looked up in the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dp_components.split_candidates.candidates import FeatureBounds
from dp_components.trust import TrustModel
from he_processors.errors import ConfigurationError
from nvflare_plugins.checks import (
    are_bounds,
    check_fields,
    expect,
    is_entry,
    is_list,
    is_mapping,
    is_number,
    is_text,
    is_whole,
    one_of,
    seconds,
)
from nvflare_plugins.data_sets.declaration import MOST_DELTA, MOST_EPSILON
from nvflare_plugins.private_trees.methods import Method
from nvflare_plugins.private_trees.presets import resolve_method

PROFILES = {
    TrustModel.DISTRIBUTED: "dp_distributed",
    TrustModel.TRUSTED_AGGREGATOR: "dp_trusted",
    TrustModel.LOCAL: "dp_local",
}
_ASSUMED_FEATURES = 1000  # where the job does not name them

_NOT_PAID_FOR = "nothing pays for it: score the finished model on data of your own"
_REFUSED = {
    "eval_data_set": f"a metric is a sum over rows, and {_NOT_PAID_FOR}",
    "evaluate_training": f"a metric is a sum over rows, and {_NOT_PAID_FOR}",
    "eval_metric": f"a metric is a sum over rows, and {_NOT_PAID_FOR}",
    "evals": f"a metric is a sum over rows, and {_NOT_PAID_FOR}",
    "early_stopping_rounds": "it looks at a metric after each round, which nothing pays for: choose n_trees beforehand",
    "num_rounds": "the number of rounds follows from the method: set n_trees and batch_size in components",
    "params": "XGBoost's parameters follow from the method: set its components",
    "base_score": "the label mean is a sum over rows: training starts from the public 1/2",
    "base_margin": "margins from elsewhere may depend on the rows",
    "scale_pos_weight": "use a weight column with max_weight",
    "cuts": "exact cuts are data: choose the method's candidates",
    "initial_model": "a model from elsewhere may have been trained on the same rows without the ledger's knowledge",
    "checkpoint_every": "the ledger keeps what was released: resume_from replays it",
}


@dataclass(frozen=True, slots=True)
class PrivateTreesJob:
    """One private training: same columns at every site, other rows, labels of two classes.

    Privacy: (epsilon, delta) towards adding or removing the rows of one person, up to ``rows_per_person`` of them in
        the union of the sites. Sites as a whole are not protected.

    Attributes:
        data_set: name of the training set in every site's policy, which must give it a privacy budget.
        label: label column, of 0 and 1 or of two ``label_classes``.
        epsilon, delta: what this job may spend; delta is given, never computed from the data.
        feature_bounds: public (low, high) of every numeric feature; values outside are clipped to it.
        categories: public category list of each categorical column; unknown categories count as missing.
        features: columns to train on, in this order; None means all columns of the file but label and weight. Each
            needs bounds or categories.
        label_classes: public list of the label's two values; the second one is the positive one.
        method: a preset: ``default``, ``few_rounds``, or a paper's name such as ``dp_rf`` (presets.py).
        components: components of the method to exchange one by one: ``split_method`` (C1), ``weight_update`` (C2),
            ``candidates`` (C3), ``interactions`` and ``n_features_per_tree`` (A1), ``batch_size`` (A2), ``query``,
            ``n_trees``, ``depth``, ``n_candidates``, ``learning_rate``, ``ridge``, ``noise_ridge``, ``clip``,
            ``hessian_rounds``, ``candidate_share``, and ``grower``: ``sites`` (the default: numpy at every site) or,
            for totally random trees, ``xgboost`` (XGBoost's refresh: the same model in more time).
        trust: ``distributed`` (each site adds a share of the noise under masks), ``trusted_aggregator`` (the server
            sees exact sums and adds the noise once) or ``local`` (a baseline: every row is noised by itself).
        colluders: sites that may pool what they know, the observer included; distributed noise holds against so many.
        n_sites: number of sites that the noise is meant for; None means those that take part.
        n_rows: number of all sites' rows, declared public; only ``local`` needs it, for the ridge.
        rows_per_person: most rows of one person; the noise grows with it.
        structure_seed: public seed of the random trees. The guarantee holds for every seed, so that nothing is gained
            by agreeing on it in secret, and a resumed job must draw the same trees. Noise never comes from it.
        weight: column of row weights; needs ``max_weight``, the public largest one, to which they are clipped.
        resume_from: id of an interrupted job of the same terms under distributed noise, on the same rows: what it has
            released is replayed from the sites' ledgers at no charge, by all of them or by none.
        tracking: must be False: metrics are not paid for.
        deadline_s: longest time that an exchange may wait for the slowest site; 0 derives it from the job's size.
    """

    data_set: str
    label: str
    epsilon: float
    delta: float
    feature_bounds: dict[str, list[float]] = field(default_factory=dict)
    categories: dict[str, list[Any]] = field(default_factory=dict)
    features: list[str] | None = None
    label_classes: list[Any] | None = None
    method: str = "default"
    components: dict[str, Any] = field(default_factory=dict)
    trust: str = TrustModel.DISTRIBUTED.value
    colluders: int = 1
    n_sites: int | None = None
    n_rows: int | None = None
    rows_per_person: int = 1
    structure_seed: int = 0
    weight: str | None = None
    max_weight: float | None = None
    resume_from: str | None = None
    tracking: bool = False
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("data_set", "label"):
            expect(f"{name} must be a non-empty text", is_text(getattr(self, name)))
        for name in ("weight", "resume_from"):
            value = getattr(self, name)
            expect(f"{name} must be a non-empty text, or be left out", value is None or is_text(value))
        in_range = is_number(self.epsilon) and 0 < self.epsilon <= MOST_EPSILON
        expect(f"epsilon must be a number above 0 and at most {MOST_EPSILON:g}", in_range)
        expect(
            f"delta must be a number above 0, at most {MOST_DELTA:g} and far below one over the number of rows",
            is_number(self.delta) and 0 < self.delta <= MOST_DELTA,
        )
        seconds("deadline_s", self.deadline_s)
        expect("metrics are not paid for: tracking must be off", self.tracking is False)
        expect("structure_seed must be a whole number from 0 to 2^63", is_whole(self.structure_seed, 0, 1 << 63))
        expect("rows_per_person must be a whole number of at least 1", is_whole(self.rows_per_person, 1))
        self._check_trust()
        self._check_columns()
        expect("method must be a text", is_text(self.method))
        expect("components must be a dictionary with names for keys", is_mapping(self.components))
        self.resolve(self.n_features or _ASSUMED_FEATURES)

    def _check_trust(self) -> None:
        names = [trust.value for trust in TrustModel]
        one_of("trust", self.trust, names)
        expect("n_sites must be a whole number of at least 1", self.n_sites is None or is_whole(self.n_sites, 1))
        expect(
            "colluders must be at least 1: every site sees the model and knows its own share of the noise",
            is_whole(self.colluders, 1),
        )
        is_local = self.trust == TrustModel.LOCAL.value
        if is_local != (self.n_rows is not None) or (is_local and not is_whole(self.n_rows, 1)):
            raise ConfigurationError(
                "trust=local needs n_rows, the number of all sites' rows, declared public; no other trust model uses it"
            )
        if self.n_sites is not None and self.trust == TrustModel.DISTRIBUTED.value and self.colluders >= self.n_sites:
            raise ConfigurationError(
                f"{self.colluders} colluder(s) among {self.n_sites} site(s) would know all of the noise: add sites or "
                "tolerate fewer"
            )
        if self.resume_from is not None and self.trust == TrustModel.TRUSTED_AGGREGATOR.value:
            raise ConfigurationError(
                "a job with a trusted aggregator cannot be resumed: the server's noise is gone, and fresh noise on the "
                "same sums would be a further release. Submit it anew; it is charged anew"
            )

    def _check_columns(self) -> None:
        features, classes = self.features, self.label_classes
        expect("features must be a list of column names", features is None or is_list(features, is_text))
        expect(
            "label_classes must be a list of two texts or whole numbers",
            classes is None or (is_list(classes, is_entry) and len(classes) == 2),
        )
        expect(
            "categories must give each column a list of texts or whole numbers",
            is_mapping(self.categories) and all(is_list(v, is_entry) for v in self.categories.values()),
        )
        expect(
            "feature_bounds must give each column two finite numbers, the lower one first",
            is_mapping(self.feature_bounds) and all(map(are_bounds, self.feature_bounds.values())),
        )
        both = sorted(set(self.feature_bounds) & set(self.categories))
        expect(f"bounds and categories are both given for {', '.join(both)}", not both)
        if features is not None:
            self.check_features(features)
        if (self.weight is None) != (self.max_weight is None):
            raise ConfigurationError(
                "row weights need max_weight, their public bound: an unbounded row would have no bounded influence"
            )
        positive = self.max_weight is None or (is_number(self.max_weight) and self.max_weight > 0)
        expect("max_weight must be a number above 0", positive)

    def check_features(self, names: list[str] | tuple[str, ...]) -> None:
        """Refuse features without public bounds or categories, and bounds of columns that are no features.

        Raises:
            ConfigurationError: it names them.
        """
        missing = [name for name in names if name not in self.feature_bounds and name not in self.categories]
        if missing:
            raise ConfigurationError(
                f"feature_bounds lacks public bounds of {', '.join(missing)}. Give each numeric feature (low, high) "
                "from public knowledge, never from the rows, and each categorical one its list in categories"
            )
        extra = sorted((set(self.feature_bounds) | set(self.categories)) - set(names))
        if extra:
            raise ConfigurationError(f"bounds or categories are given for what is no feature: {', '.join(extra)}")

    @property
    def trust_model(self) -> TrustModel:
        """Who may see what before the noise is on it."""
        return TrustModel(self.trust)

    @property
    def profile(self) -> str:
        """The profile in the words of site policies."""
        return PROFILES[self.trust_model]

    @property
    def n_features(self) -> int:
        """Number of features, which the job fixes: each has bounds or categories."""
        return len(self.feature_bounds) + len(self.categories)

    def bounds_of(self, name: str) -> FeatureBounds:
        """Return the public interval of a feature; a categorical one holds positions in its list."""
        if name in self.categories:
            return FeatureBounds(0.0, float(len(self.categories[name]) - 1))
        return FeatureBounds(*map(float, self.feature_bounds[name]))

    def resolve(self, n_features: int) -> Method:
        """Return the method for so many features. Raises: ConfigurationError."""
        return resolve_method(self.method, self.components, n_features)

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> PrivateTreesJob:
        """Read a job strictly.

        Raises:
            ConfigurationError: unknown or missing fields, or a value that is not allowed. What other trainings offer
                and privacy forbids is refused by its name.
        """
        for name, why in _REFUSED.items():
            if isinstance(document, dict) and name in document:
                raise ConfigurationError(f"{name} is refused in private training: {why}")
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**check_fields(document, known, ("data_set", "label", "epsilon", "delta")))
