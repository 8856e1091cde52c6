"""What a site remembers of its policy between jobs, so that a change does not go unnoticed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from nvflare_plugins.files import write_atomically
from nvflare_plugins.site.policy.policy import SitePolicy

_NOT_POLICY = ("site", "workspace")


def policy_changes(policy: SitePolicy) -> list[str]:
    """Return the keys of the policy that have changed since this was last asked, and remember what they are now.

    Hashes lie beside the registry, readable by the site alone. The first time, and where the file was lost or spoilt,
    there is nothing to compare with.
    """
    path = memory_file(policy)
    before, now = _remembered(path), _hashes(policy)
    if before != now:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(now, indent=1).encode() + b"\n", 0o600)
    return sorted(key for key in {*before, *now} if before and before.get(key) != now.get(key))


def memory_file(policy: SitePolicy) -> Path:
    """Return the file in which a site keeps the hashes of its policy."""
    return policy.registry.with_name(f"{policy.registry.name}.policy")


def _hashes(policy: SitePolicy) -> dict[str, str]:
    """Return a hash for each key; each consent, rule and data set counts as a key, so that the log can name it."""
    values: dict[str, object] = {}
    for key, value in dataclasses.asdict(policy).items():
        if key not in _NOT_POLICY:
            parts = {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
            values |= parts
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
        for key, value in values.items()
    }


def _remembered(path: Path) -> dict[str, str]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
