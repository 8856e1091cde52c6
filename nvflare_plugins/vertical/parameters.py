"""The check of XGBoost parameters for the vertical mode: the horizontal one, and what its trees do not do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from he_processors.errors import ConfigurationError
from nvflare_plugins.vertical.job import VerticalJob
from nvflare_plugins.xgb.parameters import ALIASES, TrainingParameters, check_parameters, without_columns

_REFUSED_VALUES: dict[str, tuple[tuple[object, ...], str]] = {
    "booster": (("dart", "gblinear"), "vertical trees are neither dropped nor weighed again; use gbtree"),
    "multi_strategy": (("multi_output_tree",), "vertical trees have no leaves that are vectors"),
    "tree_method": (("approx", "exact"), "only hist finds its cut points at each party alone"),
    "sampling_method": (("gradient_based",), "only uniform sampling of rows is replicated"),
    "device": (("cuda", "gpu"), "training runs on the CPU"),
    "process_type": (("update",), "leaves are not refreshed; continue from a model instead"),
    "seed_per_iteration": ((True, 1), "rows and columns are drawn in one sequence through the whole training"),
}
_REFUSED: dict[str, str] = {
    "debug_synchronize": "one party alone has the whole model",
    "base_margin": "a margin per row is not supported; use base_score, or continue from a model",
    "feature_weights": "weighted column sampling is not replicated; use colsample_* alone",
}


def check_vertical_parameters(
    params: Mapping[str, object], names: Sequence[str], metrics: Sequence[str] | None = None
) -> TrainingParameters:
    """Check the XGBoost parameters of a vertical job; nothing has been sent yet.

    Args:
        params: as for ``xgb.train``.
        names: the columns of all parties, the active party's first.
        metrics: the metrics, if the job holds them apart.

    Raises:
        ConfigurationError: a parameter that vertical training does not support, named with the reason; or one that
            no job supports (xgb/parameters.py).
    """
    for name, value in params.items():
        canonical = ALIASES.get(name, name)
        if canonical in _REFUSED and value not in (None, False, 0):
            raise ConfigurationError(f"parameter {name!r} is refused in vertical jobs: {_REFUSED[canonical]}.")
        refused, reason = _REFUSED_VALUES.get(canonical, ((), ""))
        if value in refused or (canonical == "device" and str(value).startswith(("cuda", "gpu"))):
            raise ConfigurationError(f"{name}={value!r} is refused in vertical jobs: {reason}.")
    allowed = {name: value for name, value in params.items() if name not in _REFUSED}
    return check_parameters(allowed, names, metrics)


def check_active_party(active: str, sites: Sequence[str] | None) -> None:
    """Refuse named sites without the one that has the label. Raises: ConfigurationError."""
    if sites is not None and active not in sites:
        raise ConfigurationError(f"the active party {active!r} is not among the sites")


def check_vertical_early(job: VerticalJob, sites: Sequence[str] | None, n_sites: int) -> None:
    """Refuse what no party would accept; constraints name columns of all, known only when they meet.

    Raises:
        ConfigurationError: parameters, or names of sites.
    """
    check_vertical_parameters(without_columns(job.params), ["any"])
    check_active_party(job.active, sites)
    for field in ("features", "categories"):
        for site in getattr(job, field):
            if sites is not None and site not in sites:
                raise ConfigurationError(f"{field} names {site!r}, which is not among the sites")
