"""Times boosting rounds in every process of a simulator run; Python imports this module by itself from PYTHONPATH.

FLARE's simulator starts its sites as processes of its own, so the only way to time NVFlare's training and ours is from
within. With VEILBOOST_BENCH_TIMINGS set to a folder, each process appends to a file there: when every
``Booster.update`` and ``Booster.eval_set`` of NVFlare's sites began and ended, and when our sites told a round.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

_FOLDER = os.environ.get("VEILBOOST_BENCH_TIMINGS")


def _note(event: str, started: float) -> None:
    line = json.dumps([event, started, time.perf_counter(), time.process_time()])
    with (Path(_FOLDER) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(line + "\n")


def _timed(cls: type, name: str, event: str) -> None:
    inner = getattr(cls, name)

    def call(self, *arguments, **named):
        started = time.perf_counter()
        try:
            return inner(self, *arguments, **named)
        finally:
            _note(event, started)

    setattr(cls, name, call)


def _time_xgboost(module) -> None:
    _timed(module.Booster, "update", "update")
    _timed(module.Booster, "eval_set", "evaluate")


def _time_ours(module) -> None:
    _timed(module.ProgressLog, "__call__", "update")


_PATCHES = {"xgboost.core": _time_xgboost, "nvflare_plugins.flare.executor": _time_ours}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets a module be found as always, and patches it once it has run."""

    def find_spec(self, name, path, target=None):
        patch = _PATCHES.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_patch(module) -> None:
            run(module)
            patch(module)

        spec.loader.exec_module = run_and_patch
        return spec


if _FOLDER:
    sys.meta_path.insert(0, _AfterImport())
