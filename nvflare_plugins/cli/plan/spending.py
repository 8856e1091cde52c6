"""The plans of private jobs: what they spend, and how much noise that means. No row is touched."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

import numpy as np

from dp_components.accounting import PrivacyCost, TradeOff, compose
from dp_components.bucket_ldp import wrong_bucket_rate
from dp_components.dpboost import LEAF_BITS, SplitTable, gradient_sensitivity, leaf_sensitivity
from dp_components.split_candidates import FeatureBounds
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.formatting import human_bytes, human_number
from nvflare_plugins.cli.options import Options
from nvflare_plugins.cli.plan.choosing import (
    BETWEEN_ROWS,
    DPBOOST,
    NOT_TWO_CLASSES,
    Advice,
    ExpectedLoss,
    NoiseToSignal,
    Person,
    of_buckets,
    of_private_trees,
    trainings,
    warnings,
)
from nvflare_plugins.kinds.dpboost.job import DpBoostJob
from nvflare_plugins.kinds.dpboost.server import steps
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob, Description, Unit
from nvflare_plugins.kinds.federboost_vertical.payment import bucket_epsilon
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.summary import lines, summarise
from nvflare_plugins.site.policy import SitePolicy, own_workspace

_SUM_BYTES = 8
_WIDTH = 17


def plan_private_trees(arguments: Options, job: PrivateTreesJob) -> str:
    """Return the plan of private trees. Raises: ConfigurationError: its noise needs other sites than these."""
    plan = JobPlan.of(job, arguments.sites)
    summary, method = summarise(plan), plan.training.method
    of_row = compose(plan.releases.events)
    epsilon = summary.epsilon_after_rounds[-1]
    rows = job.n_rows if arguments.rows is None else arguments.rows
    of_label = {} if job.label_bounds is None else {job.label: job.label_bounds}
    bounds = {**job.feature_bounds, **of_label}
    advice = Advice(
        Person.of(TradeOff.of(of_row.for_person(job.rows_per_person))),
        _of_mean_leaf(rows, method.depth, summary.rows_to_hear),
        of_private_trees(plan.training, rows, arguments.base_rate),
        trainings(arguments, job.data_set, of_row.for_person),
        warnings(epsilon, job.delta, rows, bounds),
    )
    if arguments.json:
        return json.dumps({**dataclasses.asdict(summary), **advice.figures()}, indent=2)
    return "\n".join([*lines(summary), shown_lines(advice.shown())])


def plan_dpboost(arguments: Options, job: DpBoostJob) -> str:
    """Return the plan of a DPBoost job."""
    plan = job.plan()
    n_bins = SplitTable.of(job.candidates()).n_bins
    exchanges = [int(np.prod(step.shape(n_bins))) for step in steps(job)]
    noise = [_leaf_noise(job, tree) for tree in (0, plan.ensemble_size(0) - 1)]
    bounds = {**job.feature_bounds, **({} if job.label_bounds is None else {job.label: job.label_bounds})}
    figures = {
        "epsilon": job.epsilon,
        "delta": 0.0,
        "rows_per_person": job.rows_per_person,
        "n_trees": plan.n_trees,
        "n_ensembles": plan.n_ensembles,
        "epsilon_of_a_level": plan.split_epsilon,
        "epsilon_of_leaves": plan.leaf_epsilon,
        "noise_on_first_and_last_leaf": noise,
        "n_messages": len(exchanges),
        "n_bytes": sum(exchanges) * _SUM_BYTES,
    }
    advice = Advice(
        Person.of(TradeOff.of(PrivacyCost(pure_epsilon=job.epsilon))),
        _of_largest_weight(job),
        ExpectedLoss(DPBOOST if job.label_bounds is None else NOT_TWO_CLASSES),
        trainings(
            arguments,
            job.data_set,
            lambda rows: PrivacyCost(pure_epsilon=job.epsilon / job.rows_per_person).for_person(rows),
        ),
        warnings(job.epsilon, 0.0, arguments.rows, bounds),
    )
    if arguments.json:
        return json.dumps({**figures, **advice.figures()}, indent=2)
    return shown_lines(
        {
            "method": f"{job.variant}: {plan.n_trees} trees in {plan.n_ensembles} ensemble(s)",
            "privacy": f"pure epsilon {job.epsilon:g}; {plan.split_epsilon:.3g} for a level's splits, "
            f"{plan.leaf_epsilon:.3g} for a tree's leaves",
            "noise on a leaf": f"Laplace scale {human_number(noise[0])} on weights of the first tree of an ensemble, "
            f"{human_number(noise[1])} on its last, of gradients in [-1, 1]",
            "sums": f"{len(exchanges)} messages, {human_bytes(sum(exchanges) * _SUM_BYTES)} from each site",
            **advice.shown(),
        }
    )


def _leaf_noise(job: DpBoostJob, tree: int) -> float:
    settings = job.plan().tree_settings(0, tree)
    bound = leaf_sensitivity(gradient_sensitivity(), settings.ridge, settings.leaf_bound).bound
    return math.ldexp(bound, -LEAF_BITS) / settings.leaf_epsilon


def _of_largest_weight(job: DpBoostJob) -> NoiseToSignal:
    """Return the noise on leaves of an ensemble's first and last tree over the largest weight that these can have."""
    ratios = []
    for tree in (0, job.plan().ensemble_size(0) - 1):
        largest = math.ldexp(job.plan().tree_settings(0, tree).leaf_bound, -LEAF_BITS)
        ratios.append(math.sqrt(2) * _leaf_noise(job, tree) / largest)
    first, last = (human_number(ratio, 2) for ratio in ratios)
    text = (
        f"the noise on a leaf's weight is {first} times the largest weight there is in the first tree of an ensemble, "
        f"{last} times in its last (standard deviation; before released weights are clipped)"
    )
    return NoiseToSignal({"first_tree": ratios[0], "last_tree": ratios[1]}, text)


def _of_mean_leaf(rows: int | None, depth: int, rows_to_hear: float) -> NoiseToSignal:
    """Return the noise on G over the largest G of a mean leaf, in which all of its rows agree."""
    if rows is None:
        return NoiseToSignal({}, "give --rows, where the number of all sites' rows is public, to have it told")
    of_leaf = rows / 2**depth
    ratio = rows_to_hear / of_leaf
    text = (
        f"a mean leaf has {human_number(of_leaf, 4)} of {rows:,} rows: its noise is {human_number(ratio, 2)} times its "
        f"largest possible sum, and {human_number(10 * ratio, 2)} times that of rows of which 55 in a hundred agree; "
        "the trees together average it"
    )
    return NoiseToSignal({"largest_sum_of_mean_leaf": ratio}, text)


def plan_buckets(arguments: Options, job: BucketJob) -> str:
    """Return what one passive party of a FederBoost job spends and sends; --features counts its columns.

    Raises:
        ConfigurationError: no number of features, or too many for epsilon.
    """
    if job.buckets_from is not None:
        paid = f"job {job.buckets_from} has paid for the buckets: this one sends none and is charged nothing"
        nothing = {"epsilon": 0.0, "bytes_sent": 0}
        return json.dumps(nothing, indent=2) if arguments.json else shown_lines({"privacy": paid})
    if arguments.features is None or arguments.features < 1:
        raise ConfigurationError("give --features, the columns of a passive party: its noise depends on their number")
    per_value = bucket_epsilon(job, arguments.features)
    of_row = job.epsilon if job.protected is Unit.ROW else job.epsilon * arguments.features
    wrong = wrong_bucket_rate(job.n_buckets, per_value)
    sent = None if arguments.rows is None else arguments.rows * arguments.features
    kept = (1 - wrong * job.n_buckets / (job.n_buckets - 1)) ** 2 if job.n_buckets > 1 else 1.0
    advice = Advice(
        Person.of(TradeOff.of(PrivacyCost(pure_epsilon=of_row))),
        NoiseToSignal(
            {"rows_that_count": kept},
            f"counts over randomised buckets tell as much as {100 * kept:.3g} % of the rows sent in clear",
        ),
        of_buckets(kept),
        trainings(arguments, job.data_set, lambda rows: PrivacyCost(pure_epsilon=job.epsilon).for_person(rows)),
        warnings(of_row, 0.0, arguments.rows, _described_bounds(arguments, job)),
        BETWEEN_ROWS,
    )
    if arguments.json:
        figures = {
            "epsilon": job.epsilon,
            "unit": job.unit,
            "epsilon_of_a_value": per_value,
            "epsilon_of_a_row": of_row,
        }
        figures |= {"wrong_bucket_rate": wrong}
        return json.dumps({**figures, "bytes_sent": sent, **advice.figures()}, indent=2)
    shown = {
        "privacy": f"epsilon {job.epsilon:g} for a {job.unit}: {per_value:.3g} for each value, {of_row:.3g} for a row "
        f"of {arguments.features} features",
        "noise": f"{100 * wrong:.1f} % of the values are sent in a wrong one of {job.n_buckets} buckets",
    }
    if sent is not None:
        shown["sent once"] = f"{human_bytes(sent)} by a passive party with {arguments.rows:,} rows"
    return shown_lines({**shown, **advice.shown()})


def _described_bounds(arguments: Options, job: BucketJob) -> dict[str, tuple[float, float]]:
    """Return the bounds in a passive party's own description, which is looked at where its workspace is named."""
    if arguments.workspace is None or arguments.site is None:
        return {}
    policy = SitePolicy.load(own_workspace(arguments.workspace, arguments.site), arguments.site)
    described = Description.read(policy.input_file(job.description))
    pairs = zip(described.names, described.features, strict=True)
    return {name: (of.low, of.high) for name, of in pairs if isinstance(of, FeatureBounds)}


def shown_lines(shown: Mapping[str, str | Sequence[str]]) -> str:
    """Return names with their texts; one of several lines has its name at the first."""
    lines = []
    for name, texts in shown.items():
        for number, text in enumerate([texts] if isinstance(texts, str) else texts):
            lines.append(f"{'' if number else name:<{_WIDTH}}{text}")
    return "\n".join(lines)
