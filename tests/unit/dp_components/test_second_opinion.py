"""The second accountant agrees on sound plans, and stops a job when it does not, or cannot be asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dp_components import accounting
from dp_components.accounting import check_second_opinion
from dp_components.errors import SecondOpinionDiffers, UnknownEvent
from dp_components.events import DisjointPartEvent, GaussianEvent, LaplaceEvent, NeighbouringRelation, RepeatedEvent
from dp_components.mechanisms import gaussian_event
from dp_components.sensitivity import clip_logistic_rows
from tests.support.calibration import noise_multiplier_for

ROW = NeighbouringRelation.ADD_OR_REMOVE_ROW


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 8.0])
@pytest.mark.parametrize("n_queries", [1, 200, 12000])
def test_agreement(epsilon: float, n_queries: int) -> None:
    sensitivity = clip_logistic_rows([0.5], [0.25]).sensitivity
    multiplier = noise_multiplier_for(n_queries, epsilon, 1e-6)
    plan = [RepeatedEvent(gaussian_event(32, sensitivity, multiplier), n_queries), LaplaceEvent(0.1, ROW)]
    opinion = check_second_opinion(plan, 1e-6)
    assert opinion is not None
    assert opinion.ours == pytest.approx(epsilon, rel=1e-4)
    assert opinion.autodp == pytest.approx(opinion.ours, rel=1e-10)


def test_agreement_on_disjoint_parts() -> None:
    """Of each partition the costliest part counts, for both accountants."""
    noises = {("a", 0): 9.0, ("a", 1): 5.0, ("b", 0): 7.0}
    plan = [DisjointPartEvent(GaussianEvent(noise, ROW), *part) for part, noise in noises.items()]
    opinion = check_second_opinion([*plan, GaussianEvent(6.0, ROW)], 1e-6)
    assert opinion is not None and opinion.ours > 0


@pytest.mark.parametrize("factor", [1 + 3e-9, 1 - 3e-9, 0.5, 1.1, float("nan"), float("inf")])
def test_disagreement_in_either_direction_stops_the_job(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = accounting._autodp_epsilon
    monkeypatch.setattr(accounting, "_autodp_epsilon", lambda *arguments: factor * honest(*arguments))
    with pytest.raises(SecondOpinionDiffers, match="disagree"):
        check_second_opinion(GaussianEvent(3.0, ROW), 1e-6)


def test_no_second_accountant_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "autodp.mechanism_zoo", None)
    with pytest.raises(SecondOpinionDiffers, match="install autodp"):
        check_second_opinion(GaussianEvent(3.0, ROW), 1e-6)


def test_plans_without_gaussians_need_none_but_must_be_priced() -> None:
    assert check_second_opinion([LaplaceEvent(1.0, ROW)], 1e-6) is None
    with pytest.raises(UnknownEvent):
        check_second_opinion([object()], 1e-6)  # type: ignore[list-item]


def test_nothing_is_imported_from_the_folder_above_the_working_folder(tmp_path: Path) -> None:
    """Autodp puts it on the path of modules, where others may write, such as above a folder in /tmp."""
    (tmp_path / "optional_module.py").write_text("print('run')\n")
    (tmp_path / "work").mkdir()
    program = """from dp_components.accounting import check_second_opinion
from dp_components.events import GaussianEvent
from dp_components.events import NeighbouringRelation
assert check_second_opinion([GaussianEvent(6.0, NeighbouringRelation.ADD_OR_REMOVE_ROW)], 1e-6) is not None
import optional_module
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    options: dict[str, Any] = {"cwd": tmp_path / "work", "env": environment, "capture_output": True, "text": True}
    run = subprocess.run([sys.executable, "-c", program], check=False, **options)
    assert run.returncode == 1 and "No module named 'optional_module'" in run.stderr and run.stdout == ""
