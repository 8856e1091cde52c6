"""Looking into the memory of a site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.site.memory.store import NAME, Memory
from nvflare_plugins.site.policy import SitePolicy, template


def memory_in(workspace: Path, site: str) -> Memory:
    """Return the memory of a site whose policy names no place for it."""
    return Memory(workspace / "veilboost_registry" / site, site)


def told(memory: Memory, query: str, *values: object) -> list[tuple[Any, ...]]:
    """Return what a query finds."""
    with memory.reading() as db:
        return db.execute(query, values).fetchall()


def changed(memory: Memory, query: str, *values: object) -> None:
    """Change what is stored, behind the product's back."""
    with memory.transaction() as db:
        db.execute(query, values)


def states(workspace: Path, site: str) -> list[str]:
    """Return the state of every run that a site remembers; none if it has no memory yet."""
    if not (workspace / "veilboost_registry" / site / NAME).exists():
        return []
    return [state for (state,) in told(memory_in(workspace, site), "SELECT state FROM runs ORDER BY id")]


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
