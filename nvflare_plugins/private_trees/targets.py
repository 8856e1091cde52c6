"""Which methods train which kinds of label, and how a kind of label is put into words."""

from __future__ import annotations

from dp_components.leaf_weights.query import LeafQuery
from dp_components.leaf_weights.target import Number, SeveralClasses, Target
from he_processors.errors import ConfigurationError
from nvflare_plugins.private_trees.methods import CandidateSource, Grower, Method, SplitMethod, WeightUpdate

MOST_CLASSES = 64
"""Every leaf of a tree sends so many sums twice."""


def check_target(method: Method, target: Target) -> None:
    """Refuse a method that is not made for a kind of label.

    The published split methods compare gains of one output, as does the published iterative Hessian; averaging answers
    with the share of one class; scalar queries would ask for each class apart, at the root of their number in noise.

    Raises:
        ConfigurationError: it names the component.
    """
    if isinstance(target, Number) and method.grower is Grower.XGBOOST:
        raise ConfigurationError(
            "grower=xgboost refreshes the logistic loss of two classes: leave grower away to train on label_bounds"
        )
    if not isinstance(target, SeveralClasses):
        return
    wrong = {
        "split_method": method.split_method is not SplitMethod.TOTALLY_RANDOM,
        "weight_update": method.weight_update is WeightUpdate.AVERAGING,
        "candidates": method.candidates is CandidateSource.ITERATIVE_HESSIAN,
        "query": method.query is LeafQuery.SCALAR,
        "grower": method.grower is Grower.XGBOOST,
    }
    names = [name for name, is_wrong in wrong.items() if is_wrong]
    if names:
        raise ConfigurationError(
            f"method {method.name!r} trains two classes, and label_classes lists {target.n_classes} "
            f"({', '.join(names)}): more are for totally random trees with newton or gradient updates, one query a "
            "leaf, and public or paid candidates that stay. Choose method='default', or dp_tr_newton, dp_ebm or "
            "dp_ebm_newton"
        )


def label_words(target: Target) -> str:
    """Say what the label is."""
    if isinstance(target, Number):
        return f"a number from {target.bounds.low:g} to {target.bounds.high:g}; what lies outside counts as the bound"
    return f"one of {target.n_classes} classes" if isinstance(target, SeveralClasses) else "one of two classes"
