"""Stock XGBoost, imported when something of it is first used.

It brings scikit-learn and SciPy along, which takes a second of processor time. Plans, set-ups, checks, servers and most
of what stands in front of a training need none of it.

    from nvflare_plugins.xgb import stock as xgb
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xgboost import Booster as Booster
    from xgboost import DataIter as DataIter
    from xgboost import DMatrix as DMatrix
    from xgboost import ExtMemQuantileDMatrix as ExtMemQuantileDMatrix
    from xgboost import QuantileDMatrix as QuantileDMatrix
    from xgboost import __version__ as __version__
    from xgboost import build_info as build_info
    from xgboost import core as core
    from xgboost import cv as cv
    from xgboost import train as train
else:

    def __getattr__(name):
        import xgboost

        return getattr(xgboost, name)
