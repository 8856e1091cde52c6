"""The command ``check``: what it finds and drafts, and that its own line sets a site up."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvflare_plugins.cli.main import main
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import load_table
from nvflare_plugins.recipes.recipe import BaggingXGBRecipe, HorizontalXGBRecipe
from nvflare_plugins.site.policy import SitePolicy
from tests.support.surveyed import ROWS, SECRET, hospital, labels, lines, numbers, written


def test_the_command_reports_and_drafts_and_its_own_line_sets_a_site_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = written(tmp_path, hospital().encode("latin-1"))
    assert main(["check", str(spec.path), "--label", "y"]) == 1
    text = capsys.readouterr().out
    assert "7 problems" in text and "first in row 8" in text and "NOT for private jobs" in text
    (line,) = [line for line in text.splitlines() if line.startswith("or: veilboost ")]
    words = shlex.split(line.removeprefix("or: veilboost "))
    assert main([str(tmp_path / "ws") if word == "DIR" else word for word in words]) == 0
    capsys.readouterr()
    workspace = ["check", str(tmp_path / "ws"), "--site", "site-1", "--data-set", "table"]
    assert main([*workspace, "--label", "y", "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)
    assert (
        document["is_fine"] and document["rows"] == ROWS and document["draft"]["label_classes"] == ["gesund", "krank"]
    )
    assert document["draft"]["feature_bounds"]["for_private_jobs"] is False
    assert main([*workspace, "--label", "x"]) == 1


def paste(text: str, workspace: Path) -> DataSet:
    """Run the command's own line, and return the data set of the policy that it wrote."""
    (line,) = [line for line in text.splitlines() if line.startswith("or: veilboost ")]
    words = shlex.split(line.removeprefix("or: veilboost "))
    assert main([str(workspace) if word == "DIR" else word for word in words]) == 0
    policy = SitePolicy.load(workspace, "site-1")
    (one,) = policy.data_sets.values()
    return one


@pytest.mark.parametrize("thousands", [".", "\u00a0", "\u202f", "'"])
def test_a_tab_and_spaces_that_do_not_break_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], thousands: str
) -> None:
    values = [f"{row}{thousands}{100 + row},25" for row in range(1, ROWS + 1)]
    spec = written(tmp_path, lines(values, labels(), header="x\ty", separator="\t"), "export.txt")
    assert main(["check", str(spec.path), "--label", "y"]) == 1
    text = capsys.readouterr().out
    assert text.replace("\n", "").isprintable()
    (entry,) = [json.loads(line) for line in text.splitlines() if line.startswith("  {")]
    pasted = paste(text, tmp_path / "ws")
    assert (pasted.separator, pasted.decimal, pasted.thousands, pasted.format) == ("\t", ",", thousands, "csv")
    own = SitePolicy.from_dict({"data_sets": {"export": entry}}, workspace=tmp_path, site="a").data_set("export")
    assert own == pasted
    assert load_table(own, label="y", features=["x"]).features[0, 0] == 1101.25
    with pytest.raises(SystemExit):
        main(["site-setup", str(tmp_path / "ws"), "--separator", "export=\\x"])


def test_a_name_that_no_line_of_a_shell_can_say_goes_into_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a=b.csv", "-t.csv", "{site}.csv"):
        spec = written(tmp_path, lines(numbers(), labels(), header="x;y", separator=";"), name)
        assert main(["check", str(spec.path), "--label", "y"]) == 1
        text = capsys.readouterr().out
        assert "or: veilboost" not in text and "put it into the policy's file" in text


def test_days_are_left_out_of_features_with_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    days = [f"{1 + row % 28:02d}.03.2024" for row in range(ROWS)]
    written_out = [f"202403{1 + row % 28:02d}" for row in range(ROWS)]
    spec = written(tmp_path, lines(numbers(), days, written_out, labels(), header="x,came,left,y"))
    main(["check", str(spec.path), "--label", "y"])
    text = capsys.readouterr().out
    assert "features=['x']," in text and "left out of features: ['came', 'left']" in text and "add them" in text
    main(["check", str(spec.path), "--label", "y", "--json"])
    assert json.loads(capsys.readouterr().out)[0]["draft"]["dates"] == ["came", "left"]


def test_the_line_for_a_shell_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [*(f"[{place}]{'long' * 14}" for place in range(80)), "a\nb"]
    table = pa.table({**{name: np.arange(60.0) for name in names}, "y": np.arange(60) % 2})
    pq.write_table(table, tmp_path / "t.parquet")
    assert main(["check", str(tmp_path / "t.parquet"), "--label", "y"]) == 1
    text = capsys.readouterr().out
    assert "'a\\nb' cannot be that of a feature" in text and text.count("Name it otherwise in the file") == 1
    (line,) = [line for line in text.splitlines() if line.startswith("or: veilboost ")]
    words = shlex.split(line.removeprefix("or: veilboost "))
    assert main([str(tmp_path / "ws") if word == "DIR" else word for word in words]) == 0
    assert set(SitePolicy.load(tmp_path / "ws", "site-1").data_set("t").rename) == {*names[:-1]}


def test_the_command_shows_no_value_of_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"{SECRET}{row}" if row % 2 else "9" * 40 for row in range(ROWS)]
    values = [f"{SECRET}.{row}" for row in range(ROWS)]
    odd = [SECRET if row == 3 else str(row / 7) for row in range(ROWS)]
    text = lines(texts, values, odd, [SECRET, *labels()[1:]], header="t,v,o,y") + f'{SECRET},"{SECRET},1,1\n{SECRET}\n'
    for options in (["--label", "y"], ["--label", "t", "--json"], []):
        assert main(["check", str(written(tmp_path, text).path), *options]) == 1
        assert SECRET not in capsys.readouterr().out


def test_the_command_checks_a_job_and_the_floors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = written(
        tmp_path, lines([str(row) for row in range(ROWS)], numbers(), [*labels()[:-1], "3"], header="nr,x,y")
    )
    assert main(["site-setup", str(tmp_path / "ws"), "--data-set", f"table={spec.path}"]) == 0
    logistic = {"objective": "binary:logistic"}
    for recipe, expected in (
        (HorizontalXGBRecipe("h", data_set="table", label="y", params=logistic), ["id", "label_value"]),
        (
            BaggingXGBRecipe("b", data_set="table", label="y", params=logistic, features=["x"]),
            ["label_value", "few_rows"],
        ),
    ):
        recipe.export(str(tmp_path / "jobs"))
        capsys.readouterr()
        arguments = ["check", str(tmp_path / "ws"), "--site", "site-1", "--job", str(tmp_path / "jobs" / recipe.name)]
        assert main([*arguments, "--json"]) == 1
        (document,) = json.loads(capsys.readouterr().out)
        assert [one["kind"] for one in document["findings"] if one["is_problem"]] == expected
        assert any(one["kind"] == "few_rows" for one in document["findings"])


def test_wrong_usage_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ws").mkdir()
    for arguments, said in (
        ([str(tmp_path / "ws")], "--site NAME"),
        ([str(tmp_path / "none.csv"), "--site", "a"], "belong to a workspace"),
        ([str(tmp_path / "ws"), "--site", "site-1"], "no site policy"),
    ):
        assert main(["check", *arguments]) == 1
        assert said in capsys.readouterr().err


def test_site_setup_refuses_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "site-1.csv").touch()
    for path, code in (("none.csv", 1), ("site-1.csv", 0), ("{site}.csv", 0), ("{site}.parquet", 1)):
        assert main(["site-setup", str(tmp_path / "ws"), "--data-set", f"a={tmp_path / path}"]) == code
        assert ("there is no file" in capsys.readouterr().err) == bool(code)


def test_site_setup_adds_the_readers_options_to_what_is_there(tmp_path: Path) -> None:
    spec = written(tmp_path, "a\n1\n")
    base = ["site-setup", str(tmp_path / "ws"), "--data-set", f"t={spec.path}"]
    assert main([*base, "--date", "t=a=YYYY-MM-DD", "--missing", "t=?", "--rename", "t=x=y=z"]) == 0
    assert main([*base, "--date", "t=b=DD.MM.YYYY", "--missing", "t=-", "--drop-unlabelled", "t"]) == 0
    found = SitePolicy.load(tmp_path / "ws", "site-1").data_set("t")
    assert found.dates == {"a": "YYYY-MM-DD", "b": "DD.MM.YYYY"} and found.rename == {"x=y": "z"}
    assert found.missing == (*DataSet("a", spec.path, "csv").missing, "?", "-") and found.drop_unlabelled
    assert main([*base, "--decimal", "t=;"]) == 1
