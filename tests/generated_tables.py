"""Tables that programs write into documents, between two comments: a table is kept in one place and shown in another.

    python -m tests.generated_tables        writes them all again

A region begins with ``<!-- table: SOURCE/NAME -->`` and ends with ``<!-- end of table -->``. Sources:

* ``threats``: who learns what under a family of profiles, from their rows;
* ``wire/kinds``, ``wire/vertical``: kinds of messages, and the messages of vertical jobs;
* ``wire/protocols``: what the release speaks in jobs of each kind;
* ``metrics/site``, ``metrics/server``, ``metrics/kit``: numbers for monitoring;
* ``headlines``: the figures of the first page (``tests/bench/results.py``), each alone ``<!-- figure: NAME -->``;
* ``modules/PACKAGE``: the modules and folders of a package, by the first sentence of their docstrings;
* all others: ``tests/bench/results/SOURCE.json``, what a benchmark measured, with program, command, date and machine.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from nvflare_plugins.site.profiles import THREAT_MODELS, Family, Statement, profiles_of
from nvflare_plugins.site.protocols import PROTOCOLS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "bench" / "results"
FOLDERS = ("nvflare_plugins", "he_processors", "dp_components", "jobs", "poc_workspace", "docs", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
"""All documents of the house."""

STALE = " (stale)"
"""Stands behind a figure whose code has changed since it was measured."""
_FIGURE = re.compile(r"(<!-- figure: (\w+) -->)(.*?)(<!-- end -->)")
_REGION = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of Markdown."""
    columns = list(columns)
    lines = [columns, *rows]
    shown = ["|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines]
    return "\n".join([shown[0], "|" + "---|" * len(columns), *shown[1:]]) + "\n"


def measured(name: str) -> str:
    """Return a table of a benchmark; above the first one of its file stands where the figures are from."""
    source, _, which = name.partition("/")
    found = json.loads((RESULTS / f"{source}.json").read_text(encoding="utf-8"))
    shown = table(found["tables"][which]["columns"], found["tables"][which]["rows"])
    if which != next(iter(found["tables"])) or found["program"] is None:
        return shown
    return (
        f"[`{found['program']}`]({found['program']}) (`{found['command']}`), {found['date']}; "
        f"{found['machine']}.\n\n{shown}"
    )


def first_words(path: Path) -> str:
    """Return the first paragraph of a module's docstring as Markdown, in one line."""
    words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(words.split("\n\n")[0].replace("``", "`").replace("|", "\\|").split())


def layers() -> dict[str, int]:
    """Return the folders of ``nvflare_plugins`` with their layers, from the top, as pyproject.toml says."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (stated,) = [contract["layers"] for contract in linter["contracts"] if contract["type"] == "layers"]
    return {folder: number for number, layer in enumerate(stated) for folder in re.findall(r"\w+", layer)}


def modules(package: str) -> str:
    """Return the table of a package: folders, then modules; those of ``nvflare_plugins`` from top to bottom."""
    parts = [path for path in sorted((ROOT / package).iterdir()) if (path / "__init__.py").is_file()]
    parts += [path for path in sorted((ROOT / package).glob("*.py")) if path.name != "__init__.py"]
    if package == "nvflare_plugins":
        level_of = layers()
        parts.sort(key=lambda path: level_of.get(path.stem, len(level_of)))
    rows = []
    for path in parts:
        target = f"{path.name}/README.md" if (path / "README.md").is_file() else path.name
        words = first_words(path / "__init__.py" if path.is_dir() else path)
        rows.append((f"[`{path.name if path.suffix and path.stem != '__main__' else path.stem}`]({target})", words))
    return table(("part", "what is in it"), rows)


def metrics(party: str) -> str:
    """Return the table of the numbers that a kind of party has for monitoring."""
    module = "watch.py" if party == "kit" else "metrics.py"
    source = (ROOT / "nvflare_plugins" / "flare" / module).read_text(encoding="utf-8")
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    families = [call.args for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("Family", "_one")]
    rows = [(str(name.value), str(words.value)) for name, words, *_ in families if isinstance(name, ast.Constant)]
    shown = [(f"`{name}`", words) for name, words in rows if name.startswith(f"veilboost_{party}_")]
    return table(("metric", "what it is"), shown)


def threats(profiles: Sequence[str]) -> str:
    """Return who learns what under some profiles as Markdown for docs/security, without what an earlier column says."""
    names = " | ".join(f"`{profile}`" for profile in profiles)
    lines = [f"| what they learn | {names} |", "|---" * (len(profiles) + 1) + "|"]
    for row in zip(*(Statement.rows(THREAT_MODELS[profile]) for profile in profiles), strict=True):
        said: dict[str, str] = {}
        lines.append(f"| {row[0][0]} |")
        for profile, (_, what) in zip(profiles, row, strict=True):
            start = next((cell for cell in said if what.startswith(cell)), "")
            lines[-1] += f" As under `{said[start]}`.{what[len(start) :]} |" if start else f" {what} |"
            said |= {} if what.startswith("As under") or what in said else {what: profile}
    return "\n".join(lines)


def generated(name: str) -> str:
    """Return what stands in the region of a name."""
    from nvflare_plugins.kinds.vertical import messages
    from nvflare_plugins.wire.envelope import Kind

    source, _, which = name.partition("/")
    if source == "threats":
        return threats(profiles_of(Family(which))) + "\n"
    if source == "headlines":
        from tests.bench.results import headlines

        return headlines()
    if source == "modules":
        return modules(which)
    if source == "metrics":
        return metrics(which)
    if name == "wire/protocols":
        rows = [(f"`{kind}`", str(span)) for kind, span in sorted(PROTOCOLS.items())]
        return table(("kind of job", "protocols that this release speaks"), rows)
    if name == "wire/kinds":
        kinds = sorted(Kind, key=lambda kind: kind.code)
        rows = [(str(kind.code), f"`{kind.name}`", "yes" if kind.private else "no", kind.meaning) for kind in kinds]
        return table(("code", "kind", "private", "what it is"), rows)
    if name == "wire/vertical":
        return table(
            ("type", "message", "fields, in order"),
            (
                (str(code), f"`{type_.__name__}`", messages._OF_TYPE[type_].form.words)
                for code, type_ in sorted(messages._TYPES.items())
            ),
        )
    return measured(name)


def filled(text: str, content: Callable[[str], str] = generated) -> str:
    """Return a document with all its regions as their sources have them."""
    from tests.bench.results import figure

    text = _FIGURE.sub(lambda found: found[1] + figure(found[2]) + found[4], text)
    return _REGION.sub(lambda found: found[1] + content(found[2]) + found[4], text)


def unmarked(text: str) -> str:
    """Return a document without marks of stale figures, which come and go with the code."""
    return text.replace(STALE, "")


def by_hand(text: str) -> str:
    """Return a document without what programs write into it."""
    return _REGION.sub("", text)


if __name__ == "__main__":
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        if filled(text) != text:
            path.write_text(filled(text), encoding="utf-8")
