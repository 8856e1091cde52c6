"""The command line itself: help and wrong usage need nothing of what subcommands do."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys

import pytest

from nvflare_plugins.cli import parsers
from nvflare_plugins.cli.main import main
from nvflare_plugins.evidence.threat_model import HORIZONTAL
from nvflare_plugins.site.flare_boundary import EXTRAS
from nvflare_plugins.xgb.cuts import CutMode

HEAVY = ("xgboost", "nvflare", "pandas", "numpy", "scipy", "grpc", "cryptography", "pyarrow", "sklearn")


@pytest.mark.parametrize("argument", ["--help", "plan --help", "site-setup", "verify", "plan --rows x", "nonsense"])
def test_help_and_wrong_usage_import_none_of_the_heavy_packages(argument: str) -> None:
    """They took four seconds."""
    program = (
        "import sys\nfrom nvflare_plugins.cli.main import main\n"
        f"try:\n    main({argument.split()!r})\nexcept SystemExit as end:\n    print('code', end.code)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == [f"code {0 if 'help' in argument else 2}", "[]"], done


def test_the_subcommands_that_are_imported_late_are_there() -> None:
    parser = parsers.make_parser()
    choices = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    assert list(choices) == [
        "demo",
        "site-setup",
        "check",
        "plan",
        "verify",
        "report",
        "compare",
        "predict",
        "export",
        "score",
        "snapshot",
        "models",
        "drift",
        "dossier",
        "registry",
        "ledger",
    ]
    for name, one in choices.items():
        (module,) = one.get_default("func").args
        assert callable(importlib.import_module(f"nvflare_plugins.cli.{module}").run), name


def test_choices_that_are_written_out_are_those_there_are() -> None:
    assert parsers.HORIZONTAL_PROFILES == HORIZONTAL
    assert tuple(mode.value for mode in CutMode) == parsers.CUT_MODES
    assert tuple(EXTRAS) == parsers.FLARE_EXTRAS


@pytest.mark.parametrize("empty", ["", " "])
def test_a_folder_without_a_name_is_not_the_one_in_use(capsys: pytest.CaptureFixture[str], empty: str) -> None:
    with pytest.raises(SystemExit):
        main(["site-setup", "somewhere", "--keep-in", empty])
    assert "--keep-in: name a folder" in capsys.readouterr().err


def test_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("demo", "site-setup", "plan", "verify", "report", "export", "registry"))
