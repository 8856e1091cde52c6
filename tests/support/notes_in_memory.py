"""Names noted in a memory, and read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy import SitePolicy, template
from tests.support.memories import changed, told

KEY = b"k" * 32


def note(memory: Memory, name: str) -> None:
    changed(memory, "INSERT INTO policy_keys VALUES (?, 'hash')", name)


def names(memory: Memory) -> list[str]:
    return [name for (name,) in told(memory, "SELECT name FROM policy_keys ORDER BY name")]


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigurationError) as refused:
        Memory(folder, "site-1").secret("rows", KEY)
    return str(refused.value)


def policy_of(folder: Path) -> SitePolicy:
    (folder / "local").mkdir(exist_ok=True)
    (folder / "local" / "veilboost.json").write_text(template({"credit": "credit.csv"}))
    return SitePolicy.load(folder, "site-1")
