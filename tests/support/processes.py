"""Processes of tests, forked from a server that has FLARE, numpy and XGBoost: none imports them anew."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

NEEDED = [
    "nvflare_plugins.flare.components",
    "nvflare_plugins.flare.site_guard",
    "tests.support.flare_reads",
    "tests.support.ledger_workers",
    "xgboost",
]


def processes() -> ForkServerContext:
    """Return where processes come from. They share nothing with the process of the tests but what they are given."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(NEEDED)
    return context
