"""What the documents say: links, file names, commands, policy keys and tables are compared with the repository."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock
from urllib.parse import unquote

import pytest

from jobs.examples import EXAMPLES
from nvflare_plugins.api.federation import Federation
from nvflare_plugins.cli.main import COMMANDS
from nvflare_plugins.kinds.vertical import messages
from nvflare_plugins.kinds.vertical.conversation import Flag
from nvflare_plugins.pooled.mediated.grammar import Dtype, Op
from nvflare_plugins.recipes.recipe import JobRecipe
from nvflare_plugins.wire.envelope import Codec, FrameType, Kind, Operation, Phase
from nvflare_plugins.xgb.versions import RELEASES, WHEELS
from tests.generated_tables import (
    DOCUMENTS,
    FOLDERS,
    RESULTS,
    ROOT,
    by_hand,
    filled,
    generated,
    layers,
    table,
    unmarked,
)

HISTORY = ROOT / "CHANGELOG.md"  # names what earlier versions had
POLICY = ROOT / "jobs" / "README.md"
PROTOCOL = ROOT / "nvflare_plugins" / "wire" / "PROTOCOL.md"
GUIDES = [ROOT / "jobs" / f"{name}.md" for name in ("HOSPITAL", "OPERATOR", "BANK", "PRIVACY")]
MOST_COMMANDS = 15

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_SOURCE_NAME = re.compile(r"[\w./*-]+\.(?:py|md|toml|yml|c|h|cuh|svg)")


def named(path: Path) -> str:
    """Return a document's name for the list of tests."""
    return str(path.relative_to(ROOT))


def prose(path: Path) -> str:
    """Return a document without its blocks of code."""
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """Return what links may lead to in a document, as code hosts make it from headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", prose(path))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(path: Path) -> Iterator[list[str]]:
    """Yield the command lines of a document: indented blocks, and those between backticks."""
    text = path.read_text(encoding="utf-8")
    lines = re.findall(r"(?m)^    ((?:veilboost|make|python) .*)$", text)
    lines += [line.replace("\n", " ") for line in re.findall(r"`((?:veilboost|make|python) [^`]+)`", prose(path))]
    for line in lines:
        yield shlex.split(line.partition("  #")[0])


def rows(path: Path, heading: str | None = None) -> Iterator[list[str]]:
    """Yield the cells of all rows of tables, below one heading or in a whole document."""
    text = path.read_text(encoding="utf-8")
    if heading is not None:
        text = re.split(r"(?m)^#+ ", text.partition(f" {heading}\n")[2])[0]
    for line in re.findall(r"(?m)^\| (.*) \|$", text):
        yield [cell.strip().strip("`") for cell in line.split(" | ")]


def guide_commands(path: Path) -> Iterator[str]:
    """Yield the command lines of a guide for a shell, in order."""
    yield from re.findall(r"(?m)^    (\S.*)$", prose(path))


def guide_files(path: Path) -> list[tuple[str, str]]:
    """Return the files that a guide tells to save: where, and what."""
    return re.findall(r"(?ms)^```python\n(?=# (\S+)\n)(.*?)^```$", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (path.parent / name).resolve() if name else path
        assert other.exists(), f"{named(path)} links to {target}, which is not there"
        assert not anchor or anchor in anchors(other), f"{named(path)} links to {target}: no such heading"


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path != HISTORY], ids=named)
def test_names_of_files_and_modules_exist(path: Path) -> None:
    for name in re.findall(r"`([^`\s]+)`", prose(path)):
        if _SOURCE_NAME.fullmatch(name) or (name.split("/")[0] in FOLDERS and "/" in name):
            found = any(any(start.glob(name)) for start in (ROOT, path.parent)) or any(path.parent.rglob(name))
            assert found, f"{named(path)} names {name}: no file"
        elif re.fullmatch(r"(?:nvflare_plugins|he_processors|dp_components|tests)(?:\.[a-z_]+)+", name):
            assert importlib.util.find_spec(name) is not None, f"{named(path)} names {name}, which is no module"


NOT_OURS = {
    "train_best.py",
    "train_chosen.py",
    "nvflare/lighter/impl/cert.py",
    "sacroml/attacks/structural_attack.py",
}
"""What a tuning and a selection write for their users, and files of FLARE and SACRO-ML."""


def test_files_that_sources_name_exist() -> None:
    product = [path for folder in FOLDERS if folder != "tests" for path in (ROOT / folder).rglob("*.py")]
    ours = [f"/{path.relative_to(ROOT).as_posix()}" for path in [*product, *(ROOT / "tests").rglob("*.py")]]
    named_there = {
        (named(path), name)
        for path in product
        for name in re.findall(r"(?<![\w./{}*])(?:[\w.]+/)*[a-z_0-9]+\.py\b", path.read_text(encoding="utf-8"))
        if name not in NOT_OURS and not any(one.endswith(f"/{name}") for one in ours)
    }
    assert named_there == set()


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path != HISTORY], ids=named)
def test_commands_exist_with_their_options(path: Path) -> None:
    targets = re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
    variables = re.findall(r"(?m)^(\w+) \?=", (ROOT / "Makefile").read_text(encoding="utf-8"))
    for words in commands(path):
        given = [word.partition("=")[0] for word in words if word.startswith("--")]
        if words[0] == "make":
            assert words[1] in targets, words
            assert {word.partition("=")[0] for word in words[2:] if "=" in word} <= set(variables), words
        elif words[0] == "veilboost":
            assert words[1] in COMMANDS, words
            assert set(given) <= {name for one in COMMANDS[words[1]].params for name in one.opts}, words
        elif words[1].startswith("/tmp/"):  # noqa: S108  # what the document itself tells to save there
            assert f"```python\n# {words[1]}\n" in path.read_text(encoding="utf-8"), words
        elif words[1].endswith(".py"):
            source = (ROOT / words[1]).read_text(encoding="utf-8")
            assert words[1] != "jobs/examples.py" or words[2] in {*EXAMPLES, "--write"}, words
            assert all(f'"{option}"' in source for option in given), words
        else:
            assert words[1] == "-m" and importlib.util.find_spec(words[2]) is not None, words


def test_a_command_that_is_not_there_is_noticed(tmp_path: Path) -> None:
    document = tmp_path / "x.md"
    document.write_text("    make demo DATA=x   # comment\n\nand `veilboost plan --rows 3`.\n")
    assert list(commands(document)) == [["make", "demo", "DATA=x"], ["veilboost", "plan", "--rows", "3"]]


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_tables_that_programs_write_are_up_to_date(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert unmarked(filled(text)) == unmarked(text), "python -m tests.generated_tables"
    assert text.count("<!-- table: ") == text.count("<!-- end of table -->")


def test_every_measured_table_is_shown_once() -> None:
    shown = [name for path in DOCUMENTS for name in re.findall(r"<!-- table: (\S+) -->", path.read_text("utf-8"))]
    measured = [
        f"{path.stem}/{name}"
        for path in RESULTS.glob("*.json")
        for name in json.loads(path.read_text("utf-8"))["tables"]
    ]
    assert len(shown) == len(set(shown))
    assert sorted(
        name for name in shown if not name.startswith(("threats/", "wire/", "modules/", "metrics/", "headlines"))
    ) == sorted(measured)


def test_a_region_gets_its_table_and_nothing_else_changes() -> None:
    text = "before\n\n<!-- table: a/b -->\n| stale |\n<!-- end of table -->\nafter\n"
    expected = text.replace("| stale |\n", "| x | y |\n|---|---|\n| 1 | |\n")
    assert filled(text, lambda name: table(("x", "y"), [("1", "")]) if name == "a/b" else "") == expected
    assert by_hand(text).split() == ["before", "after"]
    assert generated("serving/seconds").startswith("[`bench_serving.py`](bench_serving.py) (`python -m ")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the documentation site, built strictly and without the network."""
    if missing := [
        name for name in ("mkdocs", "material", "mkdocstrings_handlers") if not importlib.util.find_spec(name)
    ]:
        pytest.skip(f"the extra docs is not installed: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        "docs/mkdocs.yml",
        "--site-dir",
        str(folder),
    ]
    environment = os.environ | {
        "NO_MKDOCS_2_WARNING": "1",
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_every_document_and_its_links_lead_somewhere(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    for path in DOCUMENTS:
        page = path.with_name("index.html") if path.name == "README.md" else path.with_suffix(".html")
        assert site / page.relative_to(ROOT) in pages
    names = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    for path, text in pages.items():
        for link in re.findall(
            r'\b(?:href|src)="([^"]*)"', text.partition("</article>")[0] if path.stem != "404" else ""
        ):
            target, _, anchor = unquote(html.unescape(link)).partition("#")
            if re.match(r"[a-z]+:", target) or target.startswith("/"):
                continue
            other = (path.parent / target).resolve() if target else path
            other = other / "index.html" if other.is_dir() else other
            assert other.exists(), f"{path.relative_to(site)} links to {link}"
            assert not anchor or other not in names or anchor in names[other] or anchor == "__skip", (path, link)


def test_the_site_shows_commands_errors_and_docstrings(site: Path) -> None:
    commands_page = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    assert all(f">veilboost {name}<" in commands_page for name in COMMANDS)
    recipes_page = (site / "reference" / "nvflare_plugins.html").read_text(encoding="utf-8")
    assert "nvflare_plugins.recipes.HorizontalXGBRecipe" in recipes_page
    assert 'id="dp_components.ledger"' in (site / "reference" / "dp_components.html").read_text(encoding="utf-8")


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"""<(?:script|img|iframe|source)[^>]*\bsrc="?(?:https?:)?//|<link[^>]*\bhref="?(?:https?:)?//"""
    )
    for path in site.rglob("*.html"):
        assert not loads.search(path.read_text(encoding="utf-8")), path
    for path in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import\s*)[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")), path


def test_the_protocol_lists_every_message() -> None:
    kinds = {(str(kind.code), kind.name, "yes" if kind.private else "no") for kind in Kind}
    assert {tuple(cells[:3]) for cells in rows(PROTOCOL, "3. Kinds")} >= kinds
    frames = {tuple(cells[:2]) for cells in rows(PROTOCOL, "Types, operations, codecs")}
    assert frames >= {(code.name, str(code.value)) for codes in (FrameType, Operation, Codec) for code in codes}
    parties = {tuple(cells[:2]) for cells in rows(PROTOCOL, "6. Conversations and vertical messages")}
    assert parties >= {(str(code), type_.__name__) for code, type_ in messages._TYPES.items()}


def test_the_protocol_numbers_types_phases_and_flags() -> None:
    text = PROTOCOL.read_text(encoding="utf-8")
    assert all(f"{phase.value} `{phase.name}`" in text for phase in Phase)
    assert all(f"{flag.value} `{flag.name}`" in text for flag in Flag)
    types, type_codes, operations, operation_codes = rows(PROTOCOL, "1. What XGBoost says")
    assert dict(zip(types[1:], type_codes[1:], strict=True)) == {d.name.lower(): str(d.value) for d in Dtype}
    assert (
        dict(zip(operations[1:], operation_codes[1:], strict=True)).items()
        >= {op.name: str(op.value) for op in Op}.items()
    )


def test_the_architecture_lists_the_layers_from_top_to_bottom() -> None:
    level_of = layers()
    cells = [row[0] for row in rows(ROOT / "nvflare_plugins" / "README.md", "Folders and arrows")]
    listed = [room for cell in cells for room in re.findall(r"\[`?(\w+)`?\]", cell)]
    assert sorted(listed) == sorted(level_of)
    assert listed == sorted(listed, key=level_of.__getitem__)


def test_documents_name_the_known_releases_of_xgboost() -> None:
    for path in (ROOT / "nvflare_plugins" / "README.md", PROTOCOL):
        assert all(release.version in path.read_text(encoding="utf-8") for release in RELEASES), named(path)
    for path in (ROOT / "README.md", ROOT / "jobs" / "RUNNING.md", PROTOCOL):
        assert f"{WHEELS[0].version} to {WHEELS[-1].version}" in path.read_text(encoding="utf-8"), named(path)


@pytest.mark.parametrize("path", GUIDES, ids=named)
def test_a_guide_is_one_page_of_few_commands(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 8 <= len(list(guide_commands(path))) <= MOST_COMMANDS
    run: list[JobRecipe] = []
    monkeypatch.setattr(JobRecipe, "execute", lambda recipe, env: run.append(recipe), raising=False)
    ((_, code),) = guide_files(path)
    for arguments in ([], ["JOB_ID"]):
        monkeypatch.setattr("sys.argv", ["job.py", *arguments])
        exec(code.replace("/tmp", str(tmp_path)), {})  # noqa: S102, S108  # the document's own code
    assert run or list(tmp_path.glob("*/jobs/*/meta.json"))


def test_recipes_of_the_documents_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[JobRecipe] = []
    monkeypatch.setattr(JobRecipe, "execute", lambda recipe, env: run.append(recipe), raising=False)
    monkeypatch.setattr(
        Federation,
        "train",
        lambda federation, *given, **named: run.append(federation.recipe(*given)) or MagicMock(),
    )
    monkeypatch.chdir(tmp_path)
    for path in (ROOT / "README.md", POLICY):
        for code in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
            exec(code, {})  # noqa: S102  # the document's own code
    assert len(run) == 2
    assert len(list(tmp_path.glob("jobs/*/meta.json"))) == 3
