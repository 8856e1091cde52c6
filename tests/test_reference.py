"""What jobs may say is declared once: schemas, recipes and job folders hold to it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from he_processors.errors import ConfigurationError
from jobs import reference
from nvflare_plugins import recipes
from nvflare_plugins.api import methods
from nvflare_plugins.base.declared import schema_of
from nvflare_plugins.flare.kinds import KINDS, kind_of_controller
from nvflare_plugins.site.policy import SitePolicy, template
from nvflare_plugins.xgb.parameters import _ALLOWED as ALLOWED
from tests.conformance.kind_cases import CASES
from tests.property.test_hostile_jobs import HOSTILE

WRITTEN = (*reference.schemas(), reference.REFERENCE, reference.ERRORS, reference.STUB)
FOLDERS = sorted(reference.FOLDER.glob("*/*/config/config_fed_server.json"))


@cache
def written() -> dict[Path, str]:
    return reference.files()


def fits(kind: str, document: object) -> bool:
    """Tell whether a document fits the schema of a kind, as an editor sees it."""
    schema = json.loads((reference.FOLDER / "schema" / f"{kind}.json").read_text())
    return jsonschema.Draft202012Validator(schema).is_valid(document)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(reference.FOLDER.parent)))
def test_what_is_written_is_what_is_declared(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == written()[path], "run python jobs/reference.py"


def test_all_that_is_written_is_compared() -> None:
    assert set(written()) == set(WRITTEN)


def test_no_schema_is_left_of_a_kind_that_has_gone() -> None:
    assert set((reference.FOLDER / "schema").iterdir()) == set(reference.schemas())


@pytest.mark.parametrize("path", FOLDERS, ids=lambda path: path.parts[-4])
def test_shipped_job_folders_fit_the_schema_of_their_kind(path: Path) -> None:
    controller = json.loads(path.read_text())["workflows"][0]
    kind = kind_of_controller(controller["path"], controller["args"])
    assert kind is not None
    job = controller["args"]["job"]
    assert fits(kind.name, job)
    assert not fits(kind.name, {**job, "num_round": 3}) and not fits(kind.name, {**job, "deadline_s": -1})


@pytest.mark.parametrize("kind", KINDS)
def test_an_editor_accepts_what_a_site_accepts(kind: str) -> None:
    job_type: Any = KINDS[kind].job
    least = CASES[kind].least
    assert fits(kind, least)
    accepted = 0
    for field in dataclasses.fields(job_type):
        for value in HOSTILE:
            document = {**least, field.name: value}
            try:
                job_type.from_dict(document)
            except ConfigurationError:
                continue
            assert fits(kind, json.loads(json.dumps(document))), (field.name, value)
            accepted += 1
    assert accepted


def test_a_policy_in_an_editor(tmp_path: Path) -> None:
    assert fits("policy", json.loads(template({"credit": "data/{site}.csv"}))) and fits("policy", {})
    wrong = ({"min_site": 3}, {"min_sites": 0}, {"site": "a"}, {"data_sets": {"a": {}}}, {"consents": {"explain": 1}})
    assert not [document for document in wrong if fits("policy", document)]
    accepted = 0
    for name in schema_of(SitePolicy)["properties"]:
        for value in HOSTILE:
            try:
                SitePolicy.from_dict({name: value}, workspace=tmp_path, site="a")
            except ConfigurationError:
                continue
            assert fits("policy", json.loads(json.dumps({name: value}))), (name, value)
            accepted += 1
    assert accepted > 10


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_job_has_words(kind: str) -> None:
    fields = schema_of(KINDS[kind].job)["properties"]
    assert not [name for name, field in fields.items() if "const" not in field and not field.get("description")]


def test_every_key_of_a_policy_has_words() -> None:
    schema = reference.policy_schema()
    for part in (schema, *schema["$defs"].values()):
        assert not [name for name, field in part["properties"].items() if not field.get("description")]


@pytest.mark.parametrize("name", sorted(set(recipes.__all__) - {"JobRecipe"}))
def test_a_named_recipe_takes_the_fields_of_its_job(name: str) -> None:
    recipe = getattr(recipes, name)
    arguments = inspect.signature(recipe).parameters
    wanted = {field.name: field for field in dataclasses.fields(KINDS[recipe.kind].job)}  # type: ignore[arg-type]
    assert [*arguments] == ["name", *wanted, "sites", "min_clients"]
    for name, field in wanted.items():
        assert arguments[name].kind is inspect.Parameter.KEYWORD_ONLY
        if field.default is not dataclasses.MISSING:
            assert arguments[name].default == field.default


def test_a_table_without_a_place_on_its_page_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "PAGE.md"
    page.write_text("<!-- horizontal, written by jobs/reference.py -->\nold\n<!-- end -->\nwords\n")
    assert reference.filled(page, {"horizontal": "new\n"}).splitlines()[1:] == ["new", "<!-- end -->", "words"]
    with pytest.raises(ValueError, match=r"PAGE.md has no place for vertical"):
        reference.filled(page, {"vertical": "new\n"})


def test_what_editors_show_of_a_recipe_is_what_it_takes() -> None:
    classes = {one.name: one for one in ast.parse(reference.STUB.read_text()).body if isinstance(one, ast.ClassDef)}
    assert set(classes) == {name for name in recipes.__all__ if name != "JobRecipe"}
    for name, shown in classes.items():
        (init,) = (one for one in shown.body if isinstance(one, ast.FunctionDef))
        taken = list(inspect.signature(getattr(recipes, name)).parameters.values())
        named = dict(zip((one.arg for one in init.args.kwonlyargs), init.args.kw_defaults, strict=True))
        assert list(named) == [one.name for one in taken[1:]] and init.args.kwarg is None
        needed = {one.name for one in taken[1:] if one.default is inspect.Parameter.empty}
        assert {argument for argument, default in named.items() if default is None} == needed


def test_methods_of_the_python_interface_take_what_their_jobs_take() -> None:
    own = {"horizontal": set(), "vertical": {"id"}, "private_trees": {"budget", "bounds"}}
    for method in (methods.Horizontal, methods.Vertical, methods.Private):
        fields = {one.name for one in dataclasses.fields(KINDS[method.KIND].job)}
        names = {one.name for one in dataclasses.fields(method)}
        assert names - method.PARAMETERS - own[method.KIND] <= fields, method.KIND
        assert {"eval_metric", "monotone_constraints", "interaction_constraints", *ALLOWED} >= method.PARAMETERS
