"""The releases of XGBoost that are known message by message, and how they differ.

A release that is not listed is refused: its messages could be anything. All sites run the same one (``Terms``).

Reference: XGBoost 3.2 and 3.3, src/common/random.h, src/common/random.cc, src/tree/updater_quantile_hist.cc.
"""

from __future__ import annotations

from dataclasses import dataclass

import xgboost as xgb

from he_processors.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Release:
    """One release, and what is peculiar to it.

    Attributes:
        version: major and minor number.
        sends_column_seed: rank 0 broadcasts the seed of a column sampler that lives as long as the training. Later
            releases draw a fresh seed for each sample of columns from the one generator that also draws rows; it
            starts from the parameter ``seed`` at every rank, so nothing is sent.
        names_dart: model files say that they are of the booster dart. Later releases call every one gbtree, and give
            the trees of one from which trees were dropped their weights (``weight_drop``).
    """

    version: str
    sends_column_seed: bool
    names_dart: bool


RELEASES = (
    Release("3.2", sends_column_seed=True, names_dart=True),
    Release("3.3", sends_column_seed=False, names_dart=False),
)


def known_release(version: str) -> Release:
    """Return what is known of a version of XGBoost.

    Raises:
        ConfigurationError: nothing is known of its messages.
    """
    for release in RELEASES:
        if version.startswith(release.version + "."):
            return release
    known = " and ".join(release.version for release in RELEASES)
    raise ConfigurationError(
        f"this site runs xgboost {version}, whose messages VeilBoost does not know; it knows those of {known}: "
        f"pip install 'xgboost=={RELEASES[-1].version}.*' (Python 3.11: 'xgboost=={RELEASES[0].version}.*')"
    )


def installed_release() -> Release:
    """Return what is known of this site's XGBoost.

    Raises:
        ConfigurationError: another release than the known ones, or a build without federated learning.
    """
    release = known_release(xgb.__version__)
    if not xgb.build_info().get("USE_FEDERATED"):
        raise ConfigurationError(
            "this site's xgboost was built without federated learning (the package xgboost-cpu is): pip install xgboost"
        )
    return release
