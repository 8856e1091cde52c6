"""Commands import the heavy libraries that they need and no more: each takes up to a second of a person's time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nvflare_plugins.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[4]
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
    for (command, code, allowed), (ended, found) in zip(few, heavy_imports([one[0] for one in few], site), strict=True):
        assert ended == code, command
        assert found <= allowed, f"{' '.join(command)} imports {found - allowed}"
