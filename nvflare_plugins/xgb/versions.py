"""The releases of XGBoost that are known, what the installed one is good for, and what its communicator says.

A release that is not listed is refused: its models or messages could be anything. All sites run the same one
(``Terms``). Only training through XGBoost's communicator asks for ``installed_release``; everything else runs on every
wheel that is listed.

Reference: XGBoost 3.2 to 3.4, src/common/random.h, src/common/random.cc, src/tree/updater_quantile_hist.cc.
"""

from __future__ import annotations

from dataclasses import dataclass

from he_processors.errors import ConfigurationError
from nvflare_plugins.xgb import stock as xgb


@dataclass(frozen=True, slots=True)
class Wheel:
    """One release.

    Attributes:
        version: major and minor number.
        names_dart: model files say that they are of the booster dart. Later releases call every one gbtree, and give
            the trees of one from which trees were dropped their weights (``weight_drop``).
        has_communicator: for horizontal training, and it is known message by message.
        sends_column_seed: rank 0 broadcasts the seed of a column sampler that lives as long as the training. Later
            releases draw a fresh seed for each sample of columns from the one generator that also draws rows; it
            starts from the parameter ``seed`` at every rank, so nothing is sent.
    """

    version: str
    names_dart: bool = False
    has_communicator: bool = False
    sends_column_seed: bool = False


WHEELS = (
    Wheel("3.2", names_dart=True, has_communicator=True, sends_column_seed=True),
    Wheel("3.3", has_communicator=True),
    Wheel("3.4"),
)
RELEASES = tuple(wheel for wheel in WHEELS if wheel.has_communicator)
_TAKES = f"pip install 'xgboost=={RELEASES[-1].version}.*' (Python 3.11: 'xgboost=={RELEASES[0].version}.*')"


def known_wheel(version: str) -> Wheel:
    """Return what is known of a version of XGBoost.

    Raises:
        ConfigurationError: nothing is known of it.
    """
    for wheel in WHEELS:
        if version.startswith(wheel.version + "."):
            return wheel
    known = f"{WHEELS[0].version} to {WHEELS[-1].version}"
    raise ConfigurationError(
        f"this site runs xgboost {version}, which VeilBoost does not know; it knows {known}: pip install "
        f"'xgboost=={WHEELS[-1].version}.*' (Python 3.11: 'xgboost=={WHEELS[0].version}.*')"
    )


def known_release(version: str) -> Wheel:
    """Return what is known of the communicator of a version of XGBoost.

    Raises:
        ConfigurationError: the version is not known, or has no communicator.
    """
    wheel = known_wheel(version)
    if wheel.has_communicator:
        return wheel
    raise ConfigurationError(
        f"this site runs xgboost {version}, which has no federated communicator: horizontal training and its tuning "
        "need one where XGBoost grows the trees (engine='xgboost', booster='dart', "
        f"multi_strategy='multi_output_tree'): {_TAKES}"
    )


def installed_wheel() -> Wheel:
    """Return what is known of this site's XGBoost. Raises: ConfigurationError: it is another than the known ones."""
    return known_wheel(xgb.__version__)


def installed_release() -> Wheel:
    """Return what is known of the communicator of this site's XGBoost; ask where one opens, and nowhere else.

    Raises:
        ConfigurationError: an unknown release, one without a communicator, or a build without federated learning.
    """
    release = known_release(xgb.__version__)
    if not xgb.build_info().get("USE_FEDERATED"):
        raise ConfigurationError(
            "this site's xgboost was built without federated learning (the package xgboost-cpu is), which horizontal "
            f"training by engine='xgboost' needs: {_TAKES}"
        )
    return release
