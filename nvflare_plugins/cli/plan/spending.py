"""The plans of private jobs: what they spend, and how much noise that means. No row is touched."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping

import numpy as np

from dp_components.bucket_ldp.randomised_buckets import wrong_bucket_rate
from dp_components.dpboost.geometric_leaf_clipping import LEAF_BITS, leaf_sensitivity
from dp_components.dpboost.gradient_based_data_filtering import gradient_sensitivity
from dp_components.dpboost.split_selection import SplitTable
from he_processors.errors import ConfigurationError
from nvflare_plugins.dpboost.job import DpBoostJob
from nvflare_plugins.dpboost.server import steps
from nvflare_plugins.federboost_vertical.job import BucketJob, Unit
from nvflare_plugins.federboost_vertical.payment import bucket_epsilon
from nvflare_plugins.formatting import human_bytes
from nvflare_plugins.private_trees.job import PrivateTreesJob
from nvflare_plugins.private_trees.job_plan import JobPlan
from nvflare_plugins.private_trees.summary import lines, summarise

_SUM_BYTES = 8
_WIDTH = 17


def plan_private_trees(arguments: argparse.Namespace, job: PrivateTreesJob) -> str:
    """Return the plan of private trees. Raises: ConfigurationError: its noise needs other sites than these."""
    summary = summarise(JobPlan.of(job, arguments.sites))
    if arguments.json:
        return json.dumps(dataclasses.asdict(summary), indent=2)
    return "\n".join([*lines(summary), _line("one person", membership(summary.epsilon_after_rounds[-1], job.delta))])


def plan_dpboost(arguments: argparse.Namespace, job: DpBoostJob) -> str:
    """Return the plan of a DPBoost job."""
    plan = job.plan()
    n_bins = SplitTable.of(job.candidates()).n_bins
    exchanges = [int(np.prod(step.shape(n_bins))) for step in steps(job)]
    noise = [_leaf_noise(job, tree) for tree in (0, plan.ensemble_size(0) - 1)]
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
    if arguments.json:
        return json.dumps(figures, indent=2)
    return _lines(
        {
            "method": f"{job.variant}: {plan.n_trees} trees in {plan.n_ensembles} ensemble(s)",
            "privacy": f"pure epsilon {job.epsilon:g}; {plan.split_epsilon:.3g} for a level's splits, "
            f"{plan.leaf_epsilon:.3g} for a tree's leaves",
            "one person": membership(job.epsilon, 0.0),
            "noise on a leaf": f"Laplace scale {noise[0]:.3g} on weights of the first tree of an ensemble, "
            f"{noise[1]:.3g} on its last, of gradients in [-1, 1]",
            "sums": f"{len(exchanges)} messages, {human_bytes(sum(exchanges) * _SUM_BYTES)} from each site",
        }
    )


def _leaf_noise(job: DpBoostJob, tree: int) -> float:
    settings = job.plan().tree_settings(0, tree)
    bound = leaf_sensitivity(gradient_sensitivity(), settings.ridge, settings.leaf_bound).bound
    return math.ldexp(bound, -LEAF_BITS) / settings.leaf_epsilon


def plan_buckets(arguments: argparse.Namespace, job: BucketJob) -> str:
    """Return what one passive party of a FederBoost job spends and sends; --features counts its columns.

    Raises:
        ConfigurationError: no number of features, or too many for epsilon.
    """
    if arguments.features is None or arguments.features < 1:
        raise ConfigurationError("give --features, the columns of a passive party: its noise depends on their number")
    per_value = bucket_epsilon(job, arguments.features)
    of_row = job.epsilon if job.protected is Unit.ROW else job.epsilon * arguments.features
    wrong = wrong_bucket_rate(job.n_buckets, per_value)
    sent = None if arguments.rows is None else arguments.rows * arguments.features
    if arguments.json:
        figures = {
            "epsilon": job.epsilon,
            "unit": job.unit,
            "epsilon_of_a_value": per_value,
            "epsilon_of_a_row": of_row,
        }
        return json.dumps({**figures, "wrong_bucket_rate": wrong, "bytes_sent": sent}, indent=2)
    shown = {
        "privacy": f"epsilon {job.epsilon:g} for a {job.unit}: {per_value:.3g} for each value, {of_row:.3g} for a row "
        f"of {arguments.features} features",
        "one person": membership(of_row, 0.0, "between two rows that this person may have"),
        "noise": f"{100 * wrong:.1f} % of the values are sent in a wrong one of {job.n_buckets} buckets",
    }
    if sent is not None:
        shown["sent once"] = f"{human_bytes(sent)} by a passive party with {arguments.rows:,} rows"
    return _lines(shown)


def membership(epsilon: float, delta: float, guessed: str = "whether this person took part") -> str:
    """Say what epsilon and delta mean for a person, whatever else is known of the rows.

    Of two worlds, equally likely beforehand, that differ in this person's data, the right one is guessed with
    probability (e^epsilon + delta) / (1 + e^epsilon) at most: it follows from Kairouz, Oh, Viswanath, The Composition
    Theorem for Differential Privacy, theorem 2.1.
    """
    right = (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon))
    return f"whoever sees all of it and guesses {guessed} is right in {100 * right:.4g} % of cases at most"


def _lines(shown: Mapping[str, str]) -> str:
    return "\n".join(_line(name, text) for name, text in shown.items())


def _line(name: str, text: str) -> str:
    return f"{name:<{_WIDTH}}{text}"
