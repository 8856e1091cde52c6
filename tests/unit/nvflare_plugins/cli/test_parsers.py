"""The command line itself: help and wrong usage need nothing of what subcommands do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvflare_plugins.cli import sites, training
from nvflare_plugins.cli.main import COMMANDS, main, parse
from nvflare_plugins.site.flare_boundary import EXTRAS
from nvflare_plugins.xgb.cuts import CutMode

HEAVY = ("xgboost", "nvflare", "pandas", "numpy", "scipy", "grpc", "cryptography", "pyarrow", "sklearn")


@pytest.mark.parametrize("line", ["veilboost ", "veilboost pl", "veilboost plan --ro", "veilboost verify "])
def test_completion_imports_none_of_the_heavy_packages(line: str) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_VEILBOOST_COMPLETE": "bash_complete"}
    program = (
        "import sys\nfrom nvflare_plugins.cli.main import main\n"
        "try:\n    main()\nfinally:\n"
        f"    print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True, check=True)
    found = [text.partition(",")[2] for text in done.stdout.splitlines()]
    assert done.stderr == "[]\n"
    assert set(found) == {
        "veilboost ": {*COMMANDS},
        "veilboost pl": {"plan"},
        "veilboost plan --ro": {"--rounds", "--rows"},
        "veilboost verify ": {""},
    }[line] or found == [""]


def test_the_commands_are_there_in_their_order() -> None:
    assert list(COMMANDS) == [
        "demo",
        "site-setup",
        "check",
        "agree",
        "plan",
        "verify",
        "report",
        "compare",
        "predict",
        "release",
        "export",
        "scorecard",
        "score",
        "snapshot",
        "models",
        "runs",
        "drift",
        "dossier",
        "registry",
        "forget",
        "ledger",
        "backup",
        "watch",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plna"], "No such command 'plna'. Did you mean 'plan'?"),
        (["ledger", "--dataset", "x"], "Did you mean '--data-set'?"),
        (["check", "x", "--label", "--json"], "argument --label: expected an argument"),
        (["plan", "--rows"], "argument --rows: expected an argument"),
        (["plan", "--cuts", "best"], "argument --cuts: 'best' is not one of 'quantile', 'exact'"),
        (["predict", "m"], "the following arguments are required: DATA"),
        (["check", "x", "--job", "j", "--label", "y"], "argument --label: not allowed with argument --job"),
    ],
)
def test_wrong_usage_says_what_is_wrong(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_an_option_takes_several_values_up_to_the_next_option() -> None:
    options = parse(["plan", "--foreign-features", "5", "7", "--rows", "-3", "--foreign-features", "1", "--json"])
    assert (options.foreign_features, options.rows, options.job) == ([5, 7, 1], -3, None)
    assert parse(["plan"]).foreign_features is None


def test_the_beginning_of_an_option_is_enough_where_no_other_begins_so(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["plan", "--foreign", "5", "7", "--row=3", "--missing"])
    assert (options.foreign_features, options.rows, options.missing) == ([5, 7], 3, True)
    with pytest.raises(SystemExit):
        parse(["plan", "--ro", "3"])
    assert "No such option '--ro'" in capsys.readouterr().err


def test_a_command_prints_json_with_what_it_has_changed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["site-setup", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["command"], said["exit_code"], said["warnings"]) == ("site-setup", 0, [])
    assert said["changes"] == said["lines"] and any("new policy" in one for one in said["changes"])


def test_choices_that_are_written_out_are_those_there_are() -> None:
    assert tuple(mode.value for mode in CutMode) == training.CUT_MODES
    assert tuple(EXTRAS) == sites.FLARE_EXTRAS


@pytest.mark.parametrize("empty", ["", " "])
def test_a_folder_without_a_name_is_not_the_one_in_use(capsys: pytest.CaptureFixture[str], empty: str) -> None:
    with pytest.raises(SystemExit):
        main(["site-setup", "somewhere", "--keep-in", empty])
    assert "--keep-in: name a folder" in capsys.readouterr().err
