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
from nvflare_plugins.cli import sites, training
from nvflare_plugins.cli.main import COMMANDS, Waiting, main, parse
from nvflare_plugins.cli.options import EXITS, Options
from nvflare_plugins.flare.kinds import KINDS
from nvflare_plugins.recipes.recipe import JobRecipe
from nvflare_plugins.scoring.versions import Version
from nvflare_plugins.site.flare_boundary import EXTRAS
from nvflare_plugins.xgb.cuts import CutMode

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


# -- what commands import ----------------------------------------------------------------------------------------------


HEAVY = {
    "autodp",
    "cryptography",
    "dp_accounting",
    "grpc",
    "matplotlib",
    "numpy",
    "nvflare",
    "pandas",
    "pyarrow",
    "scipy",
    "sklearn",
    "tenseal",
    "tensorboard",
    "xgboost",
}
# One process for all: what a command finds imported, those before it were allowed as well. No process tries a start.
PROGRAM = """
import contextlib, io, json, sys
from nvflare_plugins.cli.main import main
loaded = []
for arguments in json.loads(sys.argv[1]):
    if "--check" in arguments:
        sys.modules["nvflare_plugins.cli.site_setup"].start_faults = lambda *of, **named: []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code
    loaded.append([code, sorted({name.partition(".")[0] for name in sys.modules})])
print(json.dumps(loaded))
"""


def heavy_imports(commands: list[list[str]], folder: Path) -> list[tuple[int, set[str]]]:
    """Return each command's exit code and the heavy libraries that it and those before it import."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    return [(code, HEAVY & set(modules)) for code, modules in json.loads(done.stdout)]


def test_help_and_wrong_usage_import_nothing_heavy(tmp_path: Path) -> None:
    asked = [
        ["--help"],
        ["chek"],
        *([name, "--help"] for name in COMMANDS),
        *([name, "--no-such"] for name in COMMANDS),
    ]
    assert {(code in (0, 2), *modules) for code, modules in heavy_imports(asked, tmp_path)} == {(True,)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    rows = "".join(f"{20 + n % 70},{'red' if n % 3 else 'blue'},{n % 2}\n" for n in range(300))
    (folder / "rows.csv").write_text("age,colour,died\n" + rows)
    return folder


LIGHT = {"cryptography", "numpy"}  # a tenth of a second together
FLARE = {*LIGHT, "nvflare", "grpc"}
WORKSPACE = ["workspace", "--site", "site-1"]
FEW = [
    (["verify", "."], 4, LIGHT),
    (["site-setup", "workspace", "--data-set", "rows=rows.csv"], 0, {*FLARE, "pyarrow"}),
    (["site-setup", "workspace", "--check"], 0, {*FLARE, "pyarrow"}),
    (["check", "no_such.csv"], 1, {*FLARE, "pyarrow"}),
    (["plan", str(ROOT / "jobs/alignment")], 1, {*FLARE, "pyarrow"}),
    (["plan", str(ROOT / "jobs/private_trees_default")], 0, {*FLARE, "pyarrow", "scipy"}),
    (["plan", str(ROOT / "jobs/dpboost")], 0, {*FLARE, "pyarrow", "scipy"}),
]
OF_A_SITE = [
    (["registry", *WORKSPACE], 1, {*LIGHT, "pyarrow"}),
    (["ledger", *WORKSPACE], 1, {*LIGHT, "pyarrow"}),
    (["models", "--workspace", *WORKSPACE], 0, {*LIGHT, "pyarrow"}),
    (["check", "rows.csv", "--label", "died"], 0, {*FLARE, "pyarrow", "pandas"}),  # Arrow's, from array to numpy
]


@pytest.mark.parametrize("few", [FEW, OF_A_SITE], ids=["first", "then"])
def test_commands_import_few_libraries(few: list, site: Path) -> None:
    for (words, code, allowed), (ended, found) in zip(few, heavy_imports([one[0] for one in few], site), strict=True):
        assert ended == code, words
        assert found <= allowed, f"{' '.join(words)} imports {found - allowed}"


# -- help and wrong usage need nothing of what subcommands do ----------------------------------------------------------


NOT_NEEDED = ("xgboost", "nvflare", "pandas", "numpy", "scipy", "grpc", "cryptography", "pyarrow", "sklearn")


@pytest.mark.parametrize("line", ["veilboost ", "veilboost pl", "veilboost plan --ro", "veilboost verify "])
def test_completion_imports_none_of_the_heavy_packages(line: str) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_VEILBOOST_COMPLETE": "bash_complete"}
    program = (
        "import sys\nfrom nvflare_plugins.cli.main import main\n"
        "try:\n    main()\nfinally:\n"
        f"    print([name for name in {NOT_NEEDED!r} if name in sys.modules], file=sys.stderr)"
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
