"""The run of all benchmarks in quick shapes: it names every program, and tells figures from what is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import smoke
from tests.bench.smoke import PROGRAMS, NoFigures, Program, figures

NOT_ALONE = {"bench_tuning", "fate_lane", "flare_jobs", "horizontal_flare", "results", "rival_forest", "smoke"}
"""Programs that another one starts, that need a table and a folder by hand, or that measure nothing."""


def test_every_program_that_measures_is_in_the_table() -> None:
    folder = Path(smoke.__file__).parent
    programs = {path.stem for path in folder.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    assert programs - NOT_ALONE == {program.name for program in PROGRAMS}


def test_the_last_line_must_hold_the_keys() -> None:
    assert figures('words\n{"a": {"b": 1}}', ("a/b",)) == {"a": {"b": 1}}
    for output, reason in (
        ("", "no JSON"),
        ("words", "no JSON"),
        ("[1]", "no JSON object"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": 1}\nmore', "no JSON"),
        ('{"a": {"c": 1}}', "lacks a/b"),
        ('{"a": 1}', "lacks a/b"),
    ):
        with pytest.raises(NoFigures, match=reason):
            figures(output, ("a/b",))


@pytest.mark.slow
def test_a_program_that_has_lost_a_name_fails(tmp_path: Path) -> None:
    """The control: a constant that is not there, as after a move."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smoke, "PROGRAMS", (Program("bench_tags", ("--rounds", "1"), (), {"GONE": 1}),))
        with pytest.raises(AttributeError, match="has no GONE"):
            smoke.run_here(smoke.PROGRAMS[0], "table", str(tmp_path))
    done = subprocess.run([sys.executable, "-m", "tests.bench.smoke", "--only", "bench_tags"], check=False)
    assert done.returncode == 0
