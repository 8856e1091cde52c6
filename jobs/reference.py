"""What editors and documents say of jobs and policies, from the one declaration of fields; a test holds it equal.

    python jobs/reference.py        writes jobs/schema/, the tables of jobs/README.md, the arguments of recipes

``jobs/schema/<kind>.json`` is the JSON schema of what a job folder's ``config_fed_server.json`` says under ``job``, and
``policy.json`` that of a site's ``veilboost.json``.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvflare_plugins import recipes
from nvflare_plugins.declared import description_of, schema_of, words_of
from nvflare_plugins.files import write_atomically
from nvflare_plugins.flare.kinds import KINDS
from nvflare_plugins.recipes.job_recipe import JobRecipe
from nvflare_plugins.site.policy.policy import SitePolicy
from nvflare_plugins.site.policy.values import FOLDERS

FOLDER = Path(__file__).resolve().parent
README = FOLDER / "README.md"
_TABLES = {
    "SitePolicy": "",
    "DataSet": "data_sets.NAME.",
    "Consents": "consents.",
    "VerticalRules": "vertical.",
    "DataProtection": "data_protection.",
}
_LEFT_OUT = {"data_sets.NAME.format": "by the file's suffix"}
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_ARGUMENTS = re.compile(r"^    Args:\n(?:        .*\n)+", re.MULTILINE)


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
    for owner, names in ((schema, ("site", "workspace")), (data_set, ("name",))):
        for name in names:
            del owner["properties"][name]
    del schema["required"]
    data_set["required"] = ["path"]
    for name, folder in FOLDERS.items():
        schema["properties"][name]["default"] = folder
    schema["properties"]["ledger_heads"]["default"] = f"{FOLDERS['ledgers']}/heads"
    return schema


def table(prefix: str, part: dict[str, Any], of: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each key of an object, those of objects within it after it."""
    for name, field in part["properties"].items():
        key = f"{prefix}{name}"
        ref = next((one["$ref"] for one in [field, *field.get("anyOf", [])] if "$ref" in one), None)
        default = "needed" if name in part.get("required", ()) else _LEFT_OUT.get(key)
        text = " ".join(field.get("description", "").split())
        shown = json.dumps({} if ref and "anyOf" not in field else field.get("default", {}), ensure_ascii=False)
        yield f"| `{key}` | {default or f'`{shown}`'} | {words_of(field).replace('|', '')} | {text} |"
        if ref and prefix and name != "data_protection":  # the same keys as the policy's own, which have a table
            yield from table(f"{key}.", of["$defs"][ref.rpartition("/")[2]], of)


def readme() -> str:
    """Return jobs/README.md with its tables of keys in place."""
    schema = policy_schema()
    text = README.read_text(encoding="utf-8")
    for name, prefix in _TABLES.items():
        lines = table(prefix, schema if name == "SitePolicy" else schema["$defs"][name], schema)
        head = ["| key | left out | must be | what it decides |", "|---|---|---|---|"]
        start = f"<!-- {name}, written by jobs/reference.py -->\n"
        before, _, rest = text.partition(start)
        text = before + start + "\n".join([*head, *lines]) + "\n<!-- end -->" + rest.partition("<!-- end -->")[2]
    return text


def arguments_of(recipe: type[JobRecipe]) -> str:
    """Return the arguments of a recipe for its docstring, in the words of the job's declaration."""
    job: Any = KINDS[recipe.kind].job
    names = list(inspect.signature(recipe).parameters)
    chosen = [name for name, field in schema_of(job)["properties"].items() if "const" not in field]
    others = ", ".join(f"``{name}``" for name in chosen if name not in names)
    own = {
        "name": "Name of the FLARE job.",
        "sites": "The sites that take part; None means all that FLARE assigns to the job.",
        "min_clients": f"Fewest sites; default {recipe.fewest}, or the number of ``sites``.",
        "settings": f"Any other field of ``{job.__name__}``: {others}.",
    }
    texts = [f"{name}: {own.get(name) or description_of(job, name)}" for name in names]
    return "    Args:\n" + "".join(
        textwrap.fill(text, 120, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False) + "\n"
        for text in texts
    )


def docstrings() -> dict[Path, str]:
    """Return the source of every recipe with its arguments in place, by its path."""
    found = {}
    for name in recipes.__all__:
        recipe = getattr(recipes, name)
        path = Path(inspect.getfile(recipe))
        before, after = _ARGUMENTS.split(path.read_text(encoding="utf-8"))
        found[path] = before + arguments_of(recipe) + after
    return found


def files() -> dict[Path, str]:
    """Return the text of everything that is written, by its path."""
    return schemas() | docstrings() | {README: readme()}


if __name__ == "__main__":
    (FOLDER / "schema").mkdir(exist_ok=True)
    for path, text in files().items():
        write_atomically(path, text.encode())
