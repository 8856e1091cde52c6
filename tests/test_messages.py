"""What messages name as a remedy exists: subcommands with their options, policy keys, consents, fields of jobs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from nvflare_plugins.cli.main import COMMANDS
from nvflare_plugins.data.declaration import Cluster, DataProtection, DataSet, PrivacyBudget, VerticalRules
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_values import Consents, PluginPin

ROOT = Path(__file__).parents[1] / "nvflare_plugins"
_PARTS = {
    "consents": Consents,
    "vertical": VerticalRules,
    "plugins": PluginPin,
    "data_protection": DataProtection,
    "cluster": Cluster,
}


@cache
def texts() -> list[tuple[Path, str]]:
    """Return all texts of the product that a person may read; what is put in at run time is a star."""
    return list(_texts())


def _texts() -> Iterator[tuple[Path, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        source = path.read_text()
        if not any(word in source for word in ("Policy", "`veilboost", "consents")):  # parsing takes long
            continue
        nodes = list(ast.walk(ast.parse(source)))
        documented = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if id(node) in documented or id(node) in inner:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path, node.value
            elif isinstance(node, ast.JoinedStr):
                yield path, "".join(str(p.value) if isinstance(p, ast.Constant) else "*" for p in node.values)


def policy_keys(text: str) -> list[str]:
    """Return the policy keys that a text names."""
    found = re.findall(r"Policy keys?: ([A-Za-z_.*<>]+(?:, [a-z_.*<>]+)*)", text)
    return [key.strip(".") for keys in found for key in keys.split(", ") if key != "or"]


def is_policy_key(key: str) -> bool:
    first, *rest = key.split(".")
    if first == "*":
        return True
    if not rest and first in DataSet.__dataclass_fields__:  # `veilboost check` is about one data set
        return True
    if first not in SitePolicy.__dataclass_fields__:
        return False
    if first == "data_sets":
        fields, below = DataSet.__dataclass_fields__, rest[1:]
        known = not below or below[0] == "*" or below[0] in fields
        return known and (len(below) < 2 or below[1] == "*" or below[1] in PrivacyBudget.__dataclass_fields__)
    rest = rest[1:] if first == "plugins" else rest
    return not rest or rest[0] == "*" or rest[0] in _PARTS[first].__dataclass_fields__


def command_problem(text: str) -> str | None:
    """Return what is wrong with the first command that a text names in backquotes."""
    for words in (found.split() for found in re.findall(r"`veilboost ([^`]+)`", text)):
        if words[0] == "*":
            continue
        if words[0] not in COMMANDS:
            return f"no command {words[0]}"
        known = {name for one in COMMANDS[words[0]].params for name in one.opts}
        for word in words[1:]:
            if word.startswith("--") and word.partition("=")[0].rstrip(".,;:") not in known:
                return f"{words[0]} has no {word}"
    return None


def test_policy_keys_of_messages_exist() -> None:
    wrong = [(path.name, key) for path, text in texts() for key in policy_keys(text) if not is_policy_key(key)]
    assert not wrong


def test_commands_of_messages_exist() -> None:
    wrong = [(path.name, problem) for path, text in texts() if (problem := command_problem(text)) is not None]
    assert not wrong


def test_consents_of_messages_exist() -> None:
    wrong = [
        (path.name, name)
        for path, text in texts()
        for name in re.findall(r"\bconsents\.([a-z_]+)", text)
        if name not in Consents.__dataclass_fields__
    ]
    assert not wrong


@pytest.mark.parametrize(
    "text",
    [
        "x. Policy key: consents.everything. Remedy: y",
        "Policy keys: min_sites, vertical.max_cats.",
        "Policy key: floor.",
    ],
)
def test_a_wrong_key_would_be_found(text: str) -> None:
    assert any(not is_policy_key(key) for key in policy_keys(text))


@pytest.mark.parametrize("text", ["use `veilboost heal`", "use `veilboost ledger DIR --forget`"])
def test_a_wrong_command_would_be_found(text: str) -> None:
    assert command_problem(text) is not None
