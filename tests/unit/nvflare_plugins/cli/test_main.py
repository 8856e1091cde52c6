"""The command as a whole: its version, and the ways to start it and to import what users call."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import threading
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import nvflare_plugins.recipes as recipes
from nvflare_plugins.cli import main as main_module
from nvflare_plugins.cli import plan as command
from nvflare_plugins.cli.main import COMMANDS, Waiting, main, parse
from nvflare_plugins.cli.options import EXITS, Options
from nvflare_plugins.flare.kinds import KINDS
from nvflare_plugins.recipes.recipe import JobRecipe
from nvflare_plugins.scoring.versions import Version

ROOT = Path(__file__).resolve().parents[4]


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"veilboost {version('veilboost')}\n"


def test_the_package_is_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "nvflare_plugins", "--version"], cwd=ROOT, capture_output=True)
    assert (run.returncode, run.stdout.decode()) == (0, f"veilboost {version('veilboost')}\n")


def test_every_recipe_is_imported_from_the_package() -> None:
    named = [getattr(recipes, name) for name in recipes.__all__ if name != "JobRecipe"]
    assert {recipe.kind for recipe in named} == set(KINDS) and len(named) == len(KINDS)
    assert all(issubclass(recipe, JobRecipe) for recipe in named) and set(recipes.__all__) <= set(dir(recipes))
    with pytest.raises(AttributeError, match="no attribute 'Recipes'"):
        _ = recipes.Recipes


def test_type_checkers_find_types_in_every_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("nvflare_plugins", "he_processors", "dp_components"):
        assert (ROOT / package / "py.typed").read_bytes() == b""
        assert "py.typed" in data[package]


def test_names_beyond_a_terminals_letters_are_spelt_out(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\N{SYRINGE},y\n" + "1,0\n2,1\n" * 20, encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "nvflare_plugins", "check", str(tmp_path / "t.csv"), "--label", "y"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, env=environment)
    assert run.returncode == 0 and b"\\U0001f489" in run.stdout and run.stderr == b""


def test_paths_that_python_would_take_for_others_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    assert main(["check", "/none/Übung.csv"]) == 1 and "PYTHONUTF8=1" in capsys.readouterr().err
    assert main(["check", "/none/file.csv"]) == 1 and "PYTHONUTF8" not in capsys.readouterr().err


def policy_with(folder: Path, document: dict[str, object]) -> list[str]:
    """Write a policy, and return the arguments of a command that reads it."""
    (folder / "local").mkdir(exist_ok=True)
    (folder / "local" / "veilboost.json").write_text(json.dumps(document), encoding="utf-8")
    return ["models", "--workspace", str(folder), "--site", "site-1"]


@pytest.mark.parametrize(
    ("key", "document"),
    [
        ("runs", {"runs": "/none/Läufe"}),
        ("data_sets.d.path", {"data_sets": {"d": {"path": "/none/Übung.csv"}}}),
        ("snapshots.s.folder", {"snapshots": {"s": {"url": "sqlite://", "query": "SELECT 1", "folder": "Übung"}}}),
        ("cluster.security.ca", {"cluster": {"address": "tls://a:1", "security": {"ca": "/none/Übung"}}}),
    ],
)
def test_so_are_those_of_the_policy_by_their_keys(
    key: str,
    document: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = policy_with(tmp_path, document)
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert f"veilboost.json: {key} has letters beyond ASCII" in said and "PYTHONUTF8=1" in said


def test_a_policy_with_umlauts_gives_no_traceback_in_the_locale_c(tmp_path: Path) -> None:
    arguments = policy_with(tmp_path, {"data_sets": {"d": {"path": "/none/Übung.csv"}}})
    places = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = started(*arguments, env={**os.environ, **places})
    said = run.communicate()[1]
    assert (run.returncode, "Traceback" in said) == (1, False) and "PYTHONUTF8=1" in said


def started(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nvflare_plugins", *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, **options)


def test_what_cannot_be_printed_is_no_success(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        run = started(*policy_with(tmp_path, {}), stdout=full)
        said = run.communicate()[1]
    assert (run.returncode, "Traceback" in said) == (1, False) and "the disk is full" in said


def test_a_reader_that_has_read_enough_gets_no_traceback(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    run = started(*policy_with(tmp_path, {}), stdout=write)
    os.close(write)
    assert run.communicate()[1] == "" and run.returncode == 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "not enough memory"),
        (OSError(errno.ENOSPC, "x", "/data/\x1b[31m"), 1, "/data/?[31m: the disk is full"),
        (PermissionError(errno.EACCES, "x", b"/data/x"), 1, "/data/x: a file or folder may not be used"),
    ],
)
def test_the_machine_and_the_operator_end_a_command_in_a_line(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(options: object) -> int:
        raise error

    monkeypatch.setattr(command, "run", fails)
    assert main(["plan"]) == code
    text = capsys.readouterr().err
    assert text.startswith("veilboost plan: ") and said in text and text.count("\n") == 1
    assert main(["plan", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert (told["command"], told["exit_code"]) == ("plan", code) and said in told["error"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_tells_programs_and_people_how_it_ends(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declared = COMMANDS[name]
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--json" in shown
    assert all(f"{code} {meaning}" in shown for code, meaning in declared.exits.items()) and set(EXITS) <= {
        *declared.exits
    }
    needed = [
        word
        for one in declared.params
        if one.required
        for word in ([one.opts[-1]] * (one.param_type_name == "option") + ["x.json"])
    ]

    def run(options: Options) -> int:
        options.tell(path=Path("a"), share=float("nan"), version=Version("j", "f", "0", "now"))
        sys.stdout.write("to people\n")
        return 3

    options = parse([name, *needed, "--json"])
    options.func = run
    monkeypatch.setattr(main_module, "parse", lambda arguments: options)
    assert main([]) == 3
    printed = capsys.readouterr().out
    if options.prints_json:  # what it prints is JSON already
        assert printed == "to people\n"
        return
    told = json.loads(printed)
    assert told == {
        "command": name,
        "exit_code": 3,
        "path": "a",
        "share": None,
        "version": {"job": "j", "file": "f", "sha256": "0", "named": "now"},
        "lines": ["to people"],
    }


@pytest.mark.parametrize(("shell", "at"), [("bash", "1"), ("zsh", "1"), ("fish", "ag")])
def test_shells_complete_commands(shell: str, at: str) -> None:
    words = {**os.environ, "_VEILBOOST_COMPLETE": f"{shell}_complete", "COMP_WORDS": "veilboost ag", "COMP_CWORD": at}
    run = subprocess.run([sys.executable, "-m", "nvflare_plugins"], cwd=ROOT, capture_output=True, text=True, env=words)
    assert "agree" in run.stdout and run.stderr == ""


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("is_terminal", "is_quiet"), [(True, False), (True, True), (False, False)])
def test_a_bar_is_drawn_on_terminals_alone_and_taken_away(
    is_terminal: bool, is_quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = (Terminal() if is_terminal else io.StringIO() for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(main_module, "_FIRST_S", 0.0)
    monkeypatch.setattr(main_module, "_NEXT_S", 0.01)
    is_drawn = is_terminal and not is_quiet
    with Waiting("check", is_quiet=is_quiet) as progress:
        progress(1, 4)
        for _ in range(1000 if is_drawn else 10):
            if "25%" not in err.getvalue():
                threading.Event().wait(0.01)
        sys.stdout.write("said\n")
    assert sys.stdout is out and out.getvalue() == "said\n"
    assert ("veilboost check: [######..................] 25%" in err.getvalue()) == is_drawn
    assert err.getvalue().endswith("\r\x1b[K") == is_drawn
