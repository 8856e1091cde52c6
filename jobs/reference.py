"""What editors and documents say of jobs and policies, from the one declaration of fields; a test holds it equal.

    python jobs/reference.py        writes jobs/schema/, the tables of jobs/REFERENCE.md and jobs/ERRORS.md, and
                                    what editors show of recipes (nvflare_plugins/recipes/__init__.pyi)

``jobs/schema/<kind>.json`` is the JSON schema of what a job folder's ``config_fed_server.json`` says under ``job``, and
``policy.json`` that of a site's ``veilboost.json``.
"""

from __future__ import annotations

import ast
import dataclasses
import errno
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import dp_components.errors
import he_processors.errors
import nvflare_plugins.base.errors
from nvflare_plugins import recipes
from nvflare_plugins.base.declared import description_of, schema_of, words_of
from nvflare_plugins.base.files import make_folder, write_atomically
from nvflare_plugins.cli.main import COMMANDS
from nvflare_plugins.cli.options import EXITS
from nvflare_plugins.flare.kinds import KINDS, kind_of
from nvflare_plugins.recipes.recipe import JobRecipe
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_values import FOLDERS

FOLDER = Path(__file__).resolve().parent
REFERENCE = FOLDER / "REFERENCE.md"
ERRORS = FOLDER / "ERRORS.md"
ROOT = FOLDER.parent
STUB = ROOT / "nvflare_plugins" / "recipes" / "__init__.pyi"
_PACKAGES = ("nvflare_plugins", "he_processors", "dp_components")
_NOT_OF_JOBS = ("api", "cli", "recipes", "scoring", "conformance")  # what people read at once, who called it
_ROOTS = ("VeilBoostError", "PrivacyError")
_TABLES = {
    "SitePolicy": "",
    "DataSet": "data_sets.NAME.",
    "Consents": "consents.",
    "SnapshotSource": "snapshots.NAME.",
    "VerticalRules": "vertical.",
    "ReleaseRules": "release_rules.",
    "DataProtection": "data_protection.",
    "Cluster": "cluster.",
}
_LEFT_OUT = {"data_sets.NAME.format": "by the file's suffix"}
_AFTER_JOBS = "\n## Keys of the site policy\n"
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> dict[Path, str]:
    """Return the text of every schema by its path."""
    documents = {kind.name: schema_of(kind.job) for kind in KINDS.values()} | {"policy": policy_schema()}
    return {
        FOLDER / "schema" / f"{name}.json": json.dumps({"$schema": _DRAFT, **schema}, indent=1) + "\n"
        for name, schema in documents.items()
    }


def policy_schema() -> dict[str, Any]:
    """Return the schema of a policy's file, which leaves out what is not the site's to say."""
    schema = schema_of(SitePolicy)
    data_set = schema["$defs"]["DataSet"]
    source = schema["$defs"]["SnapshotSource"]
    for owner, names in ((schema, ("site", "workspace")), (data_set, ("name",)), (source, ("name",))):
        for name in names:
            del owner["properties"][name]
    del schema["required"]
    data_set["required"] = ["path"]
    source["required"] = ["url", "query", "folder"]
    for name, folder in FOLDERS.items():
        schema["properties"][name]["default"] = folder
    schema["properties"]["ledger_heads"]["default"] = f"{FOLDERS['ledgers']}/heads"
    return schema


def table(prefix: str, part: dict[str, Any], of: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a line for each key of an object, those of objects within it after it."""
    for name, field in part["properties"].items():
        key = f"{prefix}{name}"
        ref = next((one["$ref"] for one in [field, *field.get("anyOf", [])] if "$ref" in one), None)
        default = "needed" if name in part.get("required", ()) else _LEFT_OUT.get(key)
        shown = json.dumps({} if ref and "anyOf" not in field else field.get("default", {}), ensure_ascii=False)
        yield f"`{key}`", default or f"`{shown}`", words_of(field), field.get("description", "")
        if (
            ref and prefix and name not in ("data_protection", "cluster")
        ):  # the same keys as the policy's own, which have a table
            yield from table(f"{key}.", of["$defs"][ref.rpartition("/")[2]], of)


def reference_page() -> str:
    """Return jobs/REFERENCE.md with its tables of job fields and policy keys in place."""
    policy = policy_schema()
    parts = {name: (prefix, policy["$defs"].get(name, policy), policy) for name, prefix in _TABLES.items()}
    text = REFERENCE.read_text(encoding="utf-8")
    for kind in KINDS.values():
        schema = schema_of(kind.job)
        parts[kind.name] = ("", schema, schema)
        mark = f"<!-- {kind.name}, written by jobs/reference.py -->\n"
        if mark not in text:  # a new kind stands after the others
            text = text.replace(_AFTER_JOBS, f"\n### {kind.name}\n\n{mark}<!-- end -->\n{_AFTER_JOBS}")
    head = ("key", "left out", "must be", "what it decides")
    tables = {name: _lines(head, table(*part)) for name, part in parts.items()}
    return filled(
        REFERENCE,
        tables | {"Exit codes": _lines(("command", "what it does", *map(str, EXITS), "others"), exit_codes())},
        text,
    )


def exit_codes() -> Iterator[tuple[str, ...]]:
    """Yield what each command does, and what it ends with."""
    for name, command in COMMANDS.items():
        exits = getattr(command, "exits", EXITS)
        others = "; ".join(f"{code}: {meaning}" for code, meaning in sorted(exits.items()) if code not in EXITS)
        words = " ".join((command.help or "").split("\n\n")[0].split()).partition(": ")[2]
        yield (f"`veilboost {name}`", words, *(exits[code] for code in EXITS), others)


def filled(page: Path, tables: dict[str, str], text: str | None = None) -> str:
    """Return the text of a page with each table between its marks; ValueError if one has no place."""
    text = page.read_text(encoding="utf-8") if text is None else text
    for name, lines in tables.items():
        start = f"<!-- {name}, written by jobs/reference.py -->\n"
        before, found, rest = text.partition(start)
        if not found:
            raise ValueError(f"{page.name} has no place for {name}")
        text = f"{before}{start}{lines}<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def error_kinds() -> Iterator[tuple[str, str]]:
    """Yield the kinds of errors that a log names, with what they mean."""
    for module in (he_processors.errors, nvflare_plugins.base.errors, dp_components.errors):
        for name, value in vars(module).items():
            is_own = inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == module.__name__
            if is_own and name not in _ROOTS:
                yield name, " ".join(inspect.getdoc(value).partition("\n\n")[0].split())  # type: ignore[union-attr]


def machine_codes() -> Iterator[tuple[str, str, str]]:
    """Yield codes of the operating system, what they say, and what helps."""
    for number, text in nvflare_plugins.base.errors._REASONS.items():
        what, _, remedy = text.partition(": ")
        yield errno.errorcode[number], what, remedy
    what, _, remedy = nvflare_plugins.base.errors._MEMORY.partition(": ")
    yield "MemoryError", what, remedy


def refusals() -> Iterator[tuple[str, str, str]]:
    """Yield what a job may be told with a remedy of its own: the kind of error, the text, the remedy."""
    for package in _PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.relative_to(ROOT / package).parts[0] not in _NOT_OF_JOBS:
                yield from _refusals_of(ast.parse(path.read_text(encoding="utf-8")))


def _refusals_of(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    known = {name for name, _ in error_kinds()}
    constants = {
        target.id: text
        for node in tree.body
        if isinstance(node, ast.Assign) and (text := _text(node.value))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "_refusal" and len(node.args) == 3:
            key, what, remedy = (_text(argument) for argument in node.args)
            if what:
                yield "PolicyRefusal", f"the policy of … {what}. Policy key: {key or '…'}", f"{remedy or '…'}, or ask …"
        elif name in known:
            first = node.args[0]
            text = _text(first) or (constants.get(first.id, "") if isinstance(first, ast.Name) else "")
            what, found, remedy = text.partition("Remedy: ")
            if found:
                yield name, what.strip().removesuffix("."), remedy


def _text(node: ast.expr) -> str:
    """Return a text as it stands in the code, with … where a value goes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ""


def error_page() -> str:
    """Return jobs/ERRORS.md with its tables in place."""
    rows = sorted(
        {(what, remedy, kind) for kind, what, remedy in refusals() if _says_something(what)},
        key=lambda row: (row[2], row[0]),
    )
    tables = {
        "Kinds": _lines(("the log says", "it means"), ((f"`{name}`", text) for name, text in error_kinds())),
        "Machine": _lines(
            ("code", "it means", "what helps"), ((f"`{code}`", *rest) for code, *rest in machine_codes())
        ),
        "Refusals": _lines(("it says", "remedy", "kind"), ((what, remedy, f"`{kind}`") for what, remedy, kind in rows)),
    }
    return filled(ERRORS, tables)


def _says_something(what: str) -> bool:
    """Tell whether a text has words of its own beside what is put in."""
    words = what.replace("the policy of", "").partition("Policy key")[0]
    return len(re.sub(r"[^A-Za-z]", "", words)) > 10


def _lines(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "").strip()


def recipes_stub() -> str:
    """Return what editors and type checkers read of the recipes: every argument by name, with its type and words."""
    lines = [
        "# Written by `python jobs/reference.py` from the jobs' declarations.",
        "from collections.abc import Mapping, Sequence",
        "from typing import Any",
        "",
        "from nvflare_plugins.recipes.poc_env import VeilPocEnv as VeilPocEnv",
        "from nvflare_plugins.recipes.recipe import JobRecipe as JobRecipe",
        "",
        f"__all__ = {recipes.__all__!r}",
    ]
    for name in recipes.__all__:
        made = getattr(recipes, name)
        if made is not JobRecipe:
            lines += ["", *_class_of(name, made)]
    return "\n".join([*lines, ""])


def _class_of(name: str, made: Any) -> Iterator[str]:
    job = kind_of(made.kind).job
    hints, fields = get_type_hints(job), dataclasses.fields(cast(Any, job))
    words = [(one.name, description_of(job, one.name).replace("\\", "\\\\")) for one in fields]
    intro = inspect.cleandoc(made.__doc__ or "")
    yield f"class {name}(JobRecipe):"
    yield '    """' + textwrap.indent(intro, "    ").lstrip()
    yield ""
    yield "    Args:"
    for argument, text in words:
        yield from textwrap.wrap(f"{argument}: {text}", 120, initial_indent=" " * 8, subsequent_indent=" " * 12)
    yield '    """'
    yield "    def __init__("
    yield "        self,"
    yield "        name: str,"
    yield "        *,"
    for one in fields:
        is_needed = one.default is one.default_factory is dataclasses.MISSING
        yield f"        {one.name}: {_type_text(hints[one.name])}{'' if is_needed else ' = ...'},"
    yield "        sites: Sequence[str] | None = None,"
    yield "        min_clients: int | None = None,"
    yield "    ) -> None: ..."


def _type_text(hint: Any) -> str:
    """Return a type as a caller may give it: any mapping or sequence serves for a dictionary or a list."""
    inner = [_type_text(one) for one in get_args(hint)]
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(dict.fromkeys(inner))
    name = {dict: "Mapping", list: "Sequence", type(None): "None", Any: "Any"}.get(get_origin(hint) or hint)
    return (name or hint.__name__) + (f"[{', '.join(inner)}]" if inner else "")


def files() -> dict[Path, str]:
    """Return the text of everything that is written, by its path."""
    return schemas() | {REFERENCE: reference_page(), ERRORS: error_page(), STUB: recipes_stub()}


if __name__ == "__main__":
    make_folder(FOLDER / "schema")
    for path, text in files().items():
        write_atomically(path, text.encode())
