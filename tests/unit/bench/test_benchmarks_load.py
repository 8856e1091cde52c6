"""No test runs a benchmark to its end; what a move or a deletion takes from one is noticed here."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCH.glob("*.py") if path.stem != "__init__"))
def test_a_benchmark_finds_all_that_it_imports(name: str) -> None:
    try:
        importlib.import_module(f"tests.bench.{name}")
    except ModuleNotFoundError as error:
        ours = ("tests", "jobs", "poc_workspace", "he_processors", "dp_components", "nvflare_plugins")
        if (error.name or "").split(".")[0] in ours:
            raise
        pytest.skip(f"the peer {error.name} is not installed")
