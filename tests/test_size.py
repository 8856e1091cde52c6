"""The size of the house, package by package: it only falls, unless a change says why it grew.

``tests/size.json`` holds what was measured last: files, lines of code (no blank lines, comments or docstrings) and
words of documents. After a change that makes something smaller: ``python -m tests.test_size``. After one that has to
grow: ``python -m tests.test_size "why"``, which keeps the reason beside the figures.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.generated_tables import by_hand

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "size.json"
PRODUCT = ("he_processors", "dp_components", "nvflare_plugins", "jobs", "poc_workspace")
GENERATED = {"jobs/ERRORS.md", "jobs/REFERENCE.md", "nvflare_plugins/growth/EQUALITY.md", "tests/bench/PAPERS.md"}
"""Documents that programs write; their words are not counted, nor those of tables that programs write into others."""
RUNS = {"workspace", "__pycache__", ".ipynb_checkpoints"}
"""Folders that runs leave in the house."""
SLACK = 0.02
"""By how much a figure may lie below its record before the record has to follow."""
_TEXTS = re.compile(
    r"""(?:\b[bfru]{1,2})?(?P<quote>\"{3}|'{3}|"|')(?:\\.|(?!(?P=quote)).)*(?P=quote)|\#[^\n]*""", re.S | re.I
)


def code_lines(source: str) -> int:
    """Return the number of lines of a module that hold code."""
    code, end, last = "", 0, ":"
    for text in _TEXTS.finditer(source):
        before = source[end : text.start()]
        last, end = before.rstrip()[-1:] or last, text.end()
        code += before
        if text["quote"]:
            # The first statement of a module, a class or a function documents it.
            documents = last == ":" and not before.rpartition("\n")[2].strip() and source[end : end + 1] in ("\n", "")
            code += "" if documents else re.sub("(?m)^.*$", "x", text[0])
            last = '"'
    return sum(not line.isspace() for line in (code + source[end:]).splitlines() if line)


def package_of(path: Path) -> str:
    """Return under which name a file is counted: tests and benchmarks are one each, a folder of plugins is one."""
    parts = path.parts
    if parts[:2] == ("tests", "bench"):
        return "tests/bench"
    return "/".join(parts[:2]) if parts[0] == "nvflare_plugins" and len(parts) > 2 else parts[0]


def sources() -> Iterator[Path]:
    """Yield the modules and documents of the house, below its root; nothing that a run has left there."""
    yield from (path.relative_to(ROOT) for path in ROOT.glob("*.md"))
    for place in (*PRODUCT, "docs", "tests"):
        for suffix in ("py", "md"):
            found = (ROOT / place).rglob(f"*.{suffix}")
            yield from (path.relative_to(ROOT) for path in found if not RUNS & set(path.relative_to(ROOT).parts))


@cache
def measure() -> dict[str, dict[str, int]]:
    """Return files and lines of code of each package, and words of documents that people write."""
    files, lines, words = Counter[str](), Counter[str](), 0
    for path in sources():
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.suffix == ".md":
            words += 0 if path.as_posix() in GENERATED else len(by_hand(text).split())
        else:
            files[package_of(path)] += 1
            lines[package_of(path)] += code_lines(text)
    return {"files": dict(files), "code lines": dict(lines), "words by hand": {"all documents": words}}


def recorded() -> dict[str, dict[str, int]]:
    """Return the figures of the last change that wrote them."""
    record: dict[str, dict[str, int]] = json.loads(RECORD.read_text(encoding="utf-8"))["figures"]
    return record


def grown(now: dict[str, dict[str, int]], before: dict[str, dict[str, int]]) -> list[str]:
    """Return what is larger than recorded, one line each."""
    return [
        f"{figure} of {package}: {count}, recorded {before[figure].get(package, 0)}"
        for figure, counts in now.items()
        for package, count in counts.items()
        if count > before[figure].get(package, 0)
    ]


def write(why: str) -> None:
    """Write today's figures; what grew needs a reason, which is kept with the ten before it."""
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"figures": {}, "grew because": []}
    now = measure()
    larger = grown(now, record["figures"]) if record["figures"] else []
    if larger and not why:
        sys.exit("\n".join([*larger, 'say why: python -m tests.test_size "why"']))
    reasons = [*([why] if larger else []), *record["grew because"]][:10]
    RECORD.write_text(json.dumps({"figures": now, "grew because": reasons}, indent=1, sort_keys=True) + "\n", "utf-8")


def test_nothing_grew_without_a_reason() -> None:
    assert grown(measure(), recorded()) == [], 'make it smaller, or say why: python -m tests.test_size "why"'


def test_the_record_follows_what_became_smaller() -> None:
    now = {figure: sum(counts.values()) for figure, counts in measure().items()}
    before = {figure: sum(counts.values()) for figure, counts in recorded().items()}
    assert {figure for figure in now if now[figure] < before[figure] * (1 - SLACK)} == set(), (
        "python -m tests.test_size"
    )


def test_growth_is_noticed() -> None:
    before = {"files": {"jobs": 3}, "code lines": {"jobs": 90}}
    assert grown({"files": {"jobs": 3}, "code lines": {"jobs": 91}}, before) == ["code lines of jobs: 91, recorded 90"]
    assert grown({"files": {"jobs": 3, "site": 1}, "code lines": {"jobs": 90}}, before) == [
        "files of site: 1, recorded 0"
    ]


def test_lines_of_code_are_counted_without_comments_and_docstrings() -> None:
    assert (
        code_lines(
            '"""Words\nand more."""\n\n# a remark\nx = (\n    1\n)\n\n\ndef f():\n    """Say."""\n    return x\n'
        )
        == 5
    )


if __name__ == "__main__":
    write(" ".join(sys.argv[1:]))
