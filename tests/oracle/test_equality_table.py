"""The table of equality: what it says of equal and of unlike trees, and that the page shows what is found."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path

import pytest

from tests.oracle import equality
from tests.oracle.equality import EQUAL, NOT, STORED, STRUCTURE, difference, in_page, read

PAGE = Path(__file__).parents[2] / "nvflare_plugins" / "growth" / "EQUALITY.md"


def changed(trees: list[dict], field: str, at: int, value: float) -> list[dict]:
    found = copy.deepcopy(trees)
    found[1][field][at] = value
    return found


def test_the_page_shows_what_is_found_and_all_is_equal(capsys: pytest.CaptureFixture) -> None:
    assert equality.main([]) == 0
    shown = capsys.readouterr().out
    table = shown[: shown.index("XGBoost 3.2.0: ")]
    assert table.count(f"| {EQUAL} ") == 3 * len(equality.SETTINGS)
    page = PAGE.read_text(encoding="utf-8")
    assert in_page(page, table) == page, "python -m tests.oracle.equality --write nvflare_plugins/growth/EQUALITY.md"


def test_what_differs_first_is_said() -> None:
    trees = read(STORED / "growth_trees_3.4.json.gz")["trees"]["default"]
    assert difference(trees, trees) == (EQUAL, "")
    leaf, inner = trees[1]["left_children"].index(-1), 0
    how_far, first = difference(trees, changed(trees, "split_conditions", leaf, 5.0))
    assert how_far == STRUCTURE and first.startswith(f"tree 1, split_conditions[{leaf}]: 5.0 for ")
    assert difference(trees, changed(trees, "sum_hessian", inner, 5.0))[0] == STRUCTURE
    assert difference(trees, changed(trees, "split_conditions", inner, 5.0))[0] == NOT
    assert difference(trees, changed(trees, "default_left", inner, 2))[0] == NOT
    assert difference(trees, trees[:1]) == (NOT, f"1 trees for {len(trees)}")
    without = [{k: v for k, v in tree.items() if k != "split_type"} for tree in trees]
    assert difference(trees, without) == (NOT, f"tree 0, split_type: none entries for {len(trees[0]['split_type'])}")


def test_a_release_that_is_not_known_is_held_to_the_newest_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    settings = {name: equality.SETTINGS[name] for name in ("default", "dense", "gamma")}
    monkeypatch.setattr(equality, "SETTINGS", settings)
    trees = {name: read(STORED / "growth_trees_3.4.json.gz")["trees"][name] for name in settings}
    trees["dense"] = read(STORED / "growth_trees_3.2.json.gz")["trees"]["dense"]
    del trees["gamma"]
    document = {"xgboost": "3.9.1", "trees": trees, "refused": {"gamma": "XGBoostError: no"}}
    path = tmp_path / "trees.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    assert equality.main([str(path)]) == 1
    shown = capsys.readouterr().out
    assert "XGBoost 3.9.1 (arithmetic 3.4)" in shown and "| default | equal |" in shown
    assert "1 of 3 settings equal" in shown and "  gamma: not: XGBoostError: no" in shown and "  dense: " in shown


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no place"):
        in_page("text", "table")
