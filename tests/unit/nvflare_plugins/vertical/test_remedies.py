"""Every consent, option and command that a refusal of a vertical job names is a real one; keys: test_messages.py."""

from __future__ import annotations

import ast
import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest

import nvflare_plugins
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.cli.main import COMMANDS
from nvflare_plugins.data.declaration import VerticalRules
from nvflare_plugins.kinds.alignment.job import AlignmentJob
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob
from nvflare_plugins.kinds.vertical.job import Preset, VerticalJob, VerticalProfile
from nvflare_plugins.kinds.vertical_inference import site as inference_site
from nvflare_plugins.kinds.vertical_inference.job import Action, InferenceJob
from nvflare_plugins.site.memory.budgets import PredictionBudget
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_values import Consents, JobTerms
from nvflare_plugins.xgb.parameters import ALIASES, check_parameters

ROOT = Path(nvflare_plugins.__file__).parent
SOURCES = sorted(
    path for part in ("kinds/vertical", "kinds/federboost_vertical", "recipes") for path in ROOT.glob(f"{part}/**/*.py")
)
JOBS = (VerticalJob, InferenceJob, AlignmentJob, BucketJob)


def fields(*of: type) -> set[str]:
    return {field.name for one in of for field in dataclasses.fields(one)}


OPTIONS = fields(*JOBS)
CHOICES = {
    "preset": {one.value for one in Preset},
    "action": {one.value for one in Action},
    "profile": {one.value for one in VerticalProfile},
}
KEYS = {"vertical": fields(VerticalRules), "consents": fields(Consents)}
PARAMETERS = {*ALIASES, *ALIASES.values(), *check_parameters({}, ["a"]).agreed}
NAMED = (
    OPTIONS | PARAMETERS | fields(SitePolicy) | {"id column", "a name of", "as kept"}
)  # the last two are arguments of recipes


def text_of(node: ast.expr) -> str | None:
    """Return a text as it stands in the source, ``{}`` for what is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
        return "".join(map(str, parts))
    return None


@cache
def raised_texts() -> list[tuple[str, str]]:
    """Return the place and the text of every argument of a call within a ``raise`` statement, or of a refusal."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            is_raise = isinstance(node, ast.Raise) and node.exc is not None
            is_check = (
                isinstance(node, ast.Call)
                and isinstance(node.func, (ast.Attribute, ast.Name))
                and (
                    getattr(node.func, "attr", getattr(node.func, "id", "")) in ("check_consent", "expect", "_refusal")
                )
            )
            if is_raise or is_check:
                joined = [inner for inner in ast.walk(node) if isinstance(inner, ast.JoinedStr)]
                parts = {id(part) for one in joined for part in one.values}
                for inner in ast.walk(node):
                    text = text_of(inner) if isinstance(inner, ast.expr) and id(inner) not in parts else None
                    if text:
                        found.add((f"{path.name}:{inner.lineno}", text))
    return sorted(found)


def test_texts_are_found():
    texts = [text for _, text in raised_texts()]
    joined = "\n".join(texts)
    assert len(texts) > 150 and "Policy key: vertical.max_bins" in joined and "choose preset='guarded'" in joined


def test_consents_and_keys_that_stand_alone_exist():
    for place, text in raised_texts():
        for head, name in re.findall(r"\b(consents|vertical)\.(\w+)\b", text):
            assert name in KEYS[head], (place, text)
    for key, _, remedy in inference_site._CONSENTS.values():
        assert key in fields(Consents) and any(option in remedy for option in OPTIONS)


def test_options_exist_and_take_the_values_that_are_named():
    for place, text in raised_texts():
        for name, value in re.findall(r"\b([a-z_]+)='?(\w+)'?", text):
            assert name in OPTIONS | PARAMETERS, (place, text)
            assert name not in CHOICES or value in CHOICES[name], (place, text)


def test_commands_exist():
    for place, text in raised_texts():
        for command in re.findall(r"veilboost ([a-z-]+)", text):
            assert command in COMMANDS, (place, text)


def test_remedies_name_something_real():
    for place, text in raised_texts():
        for remedy in re.findall(r"Remedy: (.+)", text):
            is_open = re.fullmatch(r"\{\}.*", remedy) is not None  # filled in by the caller, tested below
            is_request = "ask" in remedy or "bring" in remedy
            assert is_open or is_request or any(name in remedy for name in NAMED), (place, text)


@pytest.mark.parametrize("in_training", [True, False])
@pytest.mark.parametrize("rules", [{"predictions_per_job": 1}, {"predictions_per_row": 1}], ids=str)
def test_remedies_of_spent_predictions_are_options_of_the_job_that_asks(tmp_path, rules, in_training):
    policy = SitePolicy.from_dict({"vertical": rules}, workspace=tmp_path, site="site-2")
    budget = PredictionBudget(policy, "data", in_training=in_training)
    with pytest.raises(PolicyRefusal) as refused:
        for _ in range(2):
            budget.charge(["a", "b"])
    remedy = str(refused.value).partition("Remedy: ")[2]
    options = set(re.findall(r"\w+_\w+|rows(?=[,)])", remedy))
    assert options and options <= fields(VerticalJob if in_training else InferenceJob), remedy


@pytest.mark.parametrize(("check", "instead"), [("check_vertical", "paillier"), ("check_job", "masks")])
def test_plain_names_a_profile_of_the_same_kind(tmp_path, check, instead):
    document = {"allowed_profiles": ["plain"], "data_sets": {"d": {"path": "d.csv"}}}
    policy = SitePolicy.from_dict(document, workspace=tmp_path, site="site-1")
    with pytest.raises(PolicyRefusal, match=f"consents.plain_profile. Remedy: use {instead}"):
        getattr(policy, check)(JobTerms("plain", "d"), ["site-1", "site-2", "site-3"])
    kind = VerticalProfile if instead == "paillier" else None
    assert kind is None or kind(instead) is not VerticalProfile.PLAIN


def test_two_equal_aliases_name_the_key_of_the_data_set():
    from nvflare_plugins.kinds.vertical.party_data import aliases_of

    with pytest.raises(ConfigurationError, match=r"data_sets\.<name>\.aliases"):
        aliases_of({"a": "f1"}, ("a", "b"))
