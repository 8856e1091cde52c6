"""How much noise the preset noised adds, and what that costs: from the job alone, so that all parties know it.

Epsilon and delta pay for the cut points, with a twentieth of the squared budget, and for the trees that may use passive
columns, each alike. Rounds that the active party has to itself (own_rounds) cost nothing: what a tree costs falls with
their number, so few trees with passive columns after many without are the better use of a budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from dp_components.accounting.composition import compose, gaussian_limit
from dp_components.events import ComposedEvent, DiscreteGaussianEvent, RepeatedEvent
from dp_components.split_candidates.float_quantiles import descent_event
from dp_components.vertical_bins import bin_scales, tree_event, tree_sensitivity
from he_processors.elgamal.digits import SHORT_FRACTION_BITS
from he_processors.errors import ConfigurationError
from he_processors.fixed_pairs import PairFormat
from nvflare_plugins.vertical.job import VerticalJob, VerticalProfile
from nvflare_plugins.xgb.parameters import ALIASES, TrainingParameters

FRACTION_BITS = 20
"""Of noised gradients under big-number schemes: far below the noise."""
NOISED_FINEST = 2.0**-10
"""Step beside a leaf's denominator, where weights differ: noised leaves are rounded, and light rows count still."""
MAX_DEPTH = 8
CUTS_SHARE = 0.05
"""Part of the squared budget that pays for cut points."""
_TAIL = 12.0  # standard deviations: an honest value lies beyond with a chance below 1e-30
_MORE = 1 + 1e-6  # noise over what the limit asks for: discrete noise costs a little more than continuous
_LARGEST_TAIL = 1 << 36  # encoded integers: what a search for logarithms and a word of a sum still hold


@dataclass(frozen=True, slots=True)
class PartyNoise:
    """What one passive party adds.

    Attributes:
        features_per_tree: most features of the party in a tree.
        scales: noise on one sum of g and on one of h. Units: encoded integers.
        cuts_multiplier: noise over sensitivity of the counts that cut points are found by.
        of_cuts, of_tree: what these cost.
    """

    features_per_tree: int
    scales: tuple[float, float]
    cuts_multiplier: float
    of_cuts: DiscreteGaussianEvent
    of_tree: DiscreteGaussianEvent
    n_trees: int

    @property
    def whole(self) -> ComposedEvent:
        """Return what the whole job costs this party."""
        return self.of_trees(self.n_trees)

    def of_trees(self, n_trees: int) -> ComposedEvent:
        """Return what cut points and so many trees cost."""
        trees = (RepeatedEvent(self.of_tree, n_trees),) if n_trees else ()
        return ComposedEvent((self.of_cuts, *trees))


@dataclass(frozen=True, slots=True)
class NoisePlan:
    """The plan of one job.

    Attributes:
        n_trees: trees with passive columns that may be paid for, those that are paid for a second time included.
        n_repeats: trees that may be paid for again after a loss.
        depth: levels of a tree that are split: nodes on a path whose sums leave.
        n_features: most features of a passive party in a tree.
        n_bins: most bins of a passive feature.
    """

    epsilon: float
    delta: float
    n_trees: int
    depth: int
    n_features: int
    n_bins: int
    fraction_bits: int
    n_repeats: int = 0

    def of_party(self, n_features: int) -> PartyNoise:
        """Return what a party with so many features adds and pays.

        Raises:
            ConfigurationError: noise beyond what sums can hold.
        """
        return _party_noise(self, n_features)

    @property
    def tails(self) -> tuple[int, int]:
        """Return the largest noise on a sum that is taken for honest, of the party with most features."""
        g, h = self.of_party(self.n_features).scales
        return math.ceil(_TAIL * g), math.ceil(_TAIL * h)

    def pair_format(self, n_rows: int) -> PairFormat:
        """Return the number format of a scheme that adds no digits."""
        return PairFormat(self.fraction_bits, max(n_rows, 1), g_bound=1.0, h_low=0.0, h_high=1.0, tails=self.tails)

    def rows_of_noise(self, n_features: int) -> float:
        """Return the noise on one bin's sum of gradients, in rows with the largest gradient: what people can read."""
        return self.of_party(n_features).scales[0] / (1 << self.fraction_bits)


@cache
def _party_noise(plan: NoisePlan, n_features: int) -> PartyNoise:
    mu_squared = gaussian_limit(plan.epsilon, plan.delta).mu_squared
    of_tree = math.sqrt(plan.n_trees / (mu_squared * (1 - CUTS_SHARE))) * _MORE
    of_cuts = math.sqrt(1 / (mu_squared * CUTS_SHARE)) * _MORE
    most = min(n_features, plan.n_features)
    sensitivity = tree_sensitivity(most, plan.depth, 1 << plan.fraction_bits)
    n_sums = ((1 << plan.depth) - 1) * most * (plan.n_bins + 1)
    event = tree_event(n_sums, sensitivity, of_tree)
    cuts = descent_event(n_features, plan.n_bins, of_cuts)
    scales = bin_scales(sensitivity, of_tree)
    if _TAIL * max(scales) > _LARGEST_TAIL:
        raise ConfigurationError(
            "preset noised: so small an epsilon needs more noise than sums can hold. Remedy: raise epsilon, or "
            "lower num_rounds, max_depth or noised_features."
        )
    noise = PartyNoise(most, scales, of_cuts, cuts, event, plan.n_trees)
    if compose(noise.whole).epsilon(plan.delta) > plan.epsilon:
        raise ConfigurationError("preset noised: the planned noise costs more than epsilon, a defect: report it")
    return noise


def plan_of(job: VerticalJob, parameters: TrainingParameters) -> NoisePlan | None:
    """Return the plan of a job; None for another preset.

    Raises:
        ConfigurationError: trees whose noise could not be planned.
    """
    if not job.is_noised or job.epsilon is None or job.delta is None:
        return None
    effective = parameters.effective
    if any(ALIASES.get(name, name) == "monotone_constraints" for name in job.params):
        raise ConfigurationError("monotone_constraints are refused in preset noised: choose preset guarded for them")
    depth = int(effective["max_depth"])
    if not 1 <= depth <= MAX_DEPTH:
        raise ConfigurationError(f"preset noised needs max_depth from 1 to {MAX_DEPTH}: each level costs noise")
    if effective.get("grow_policy", "depthwise") != "depthwise" or int(effective["max_leaves"]) > 0:
        raise ConfigurationError("preset noised grows trees level by level: leave grow_policy and max_leaves out")
    per_round, n_rounds = trees_per_round(parameters), job.num_rounds - job.own_rounds + job.noised_repeats
    is_elgamal = job.profile == VerticalProfile.ELGAMAL.value
    return NoisePlan(
        job.epsilon,
        job.delta,
        n_rounds * per_round,
        depth,
        job.noised_features,
        job.noised_bins,
        SHORT_FRACTION_BITS if is_elgamal else FRACTION_BITS,
        job.noised_repeats * per_round,
    )


def trees_per_round(parameters: TrainingParameters) -> int:
    """Return the trees of one boosting round."""
    return parameters.objective.n_outputs * int(parameters.effective.get("num_parallel_tree", 1))


def trees_due(job: VerticalJob, parameters: TrainingParameters, n_done: int) -> int:
    """Return the trees with passive columns that are still to be grown. Args: n_done: rounds of the job."""
    return max(job.num_rounds - max(n_done, job.own_rounds), 0) * trees_per_round(parameters)
