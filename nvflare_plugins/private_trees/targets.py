"""Which methods train which kinds of label, and how a kind of label is put into words."""

from __future__ import annotations

from dp_components.leaf_weights.query import LeafQuery
from dp_components.leaf_weights.target import Number, SeveralClasses, Target
from he_processors.errors import ConfigurationError
from nvflare_plugins.private_trees.methods import Grower, Method

MOST_CLASSES = 64
"""Every leaf of a tree sends so many sums twice."""


def check_target(method: Method, target: Target) -> None:
    """Refuse a method that is not made for a kind of label.

    Scalar queries would ask for each class apart, at the root of their number in noise, and XGBoost's refresh is of two
    classes. What the papers define for two classes alone is extended to several: gains and Hessians of the classes are
    added (``split_score.py``, ``softmax.py``), and averaging counts every class.

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
        "query": method.query is LeafQuery.SCALAR,
        "grower": method.grower is Grower.XGBOOST,
    }
    names = [name for name, is_wrong in wrong.items() if is_wrong]
    if names:
        raise ConfigurationError(
            f"method {method.name!r} trains two classes, and label_classes lists {target.n_classes} "
            f"({', '.join(names)}): leave query and grower as the method has them, for one query of all classes' sums "
            "and trees that the sites grow"
        )


def label_words(target: Target) -> str:
    """Say what the label is."""
    if isinstance(target, Number):
        return f"a number from {target.bounds.low:g} to {target.bounds.high:g}; what lies outside counts as the bound"
    return f"one of {target.n_classes} classes" if isinstance(target, SeveralClasses) else "one of two classes"
