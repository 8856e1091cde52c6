"""A horizontal run that fails before it has released anything is remembered nowhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvflare_plugins.kinds.horizontal.site import run_site
from nvflare_plugins.pooled import attempt as pooled_attempt
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.wire.envelope import Operation
from tests.support.federation import Parties
from tests.support.memories import states

POLICY = {"min_effective_rows": 1, "min_rows_per_node": 0, "consents": {"exact_cuts": True}}
JOB = HorizontalJob("train", "y", {"objective": "binary:logistic", "max_depth": 2}, 1, cuts="exact")


@pytest.mark.parametrize(
    ("step", "is_remembered"), [("open_sums", False), ("check_effective_rows", True)], ids=["open", "rows"]
)
@pytest.mark.parametrize("error", [MemoryError, KeyError])
def test_a_failure_while_sums_are_opened_is_forgotten(
    step: str, is_remembered: bool, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later steps send sums: a run that a defect ends there stays in the registries."""
    parties = Parties(tmp_path, policy=POLICY)
    rng = np.random.default_rng(0)
    for site in parties.sites:
        parties.give(site, "train", pd.DataFrame({"Größe": rng.normal(size=40), "y": rng.integers(0, 2, 40)}))

    module = pooled_attempt if step == "open_sums" else pooled_attempt.row_floors
    real: Callable = getattr(module, step)

    def failing(*arguments: object) -> object:
        if is_remembered:
            real(*arguments)
        raise error

    monkeypatch.setattr(module, step, failing)
    outcomes = parties.run(run_site, JOB)
    assert all(isinstance(outcome, Exception) for outcome in outcomes.values())
    assert any(isinstance(outcome, error) for outcome in outcomes.values()), outcomes
    assert any(t.frame.operation is Operation.SUM for t in parties.transfers) == is_remembered
    assert [states(parties.workspace(site), site) for site in parties.sites] == [["reserved"] * is_remembered] * 3
