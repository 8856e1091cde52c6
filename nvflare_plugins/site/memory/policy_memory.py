"""What a site remembers of its policy between jobs, so that a change does not go unnoticed."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy import SitePolicy

_NOT_POLICY = ("site", "workspace")


def policy_changes(policy: SitePolicy) -> list[str]:
    """Return the keys of the policy that have changed since this was last asked, and remember what they are now.

    The site's memory holds hashes. The first time there is nothing to compare with.

    Raises:
        ConfigurationError: the memory is damaged.
    """
    now = _hashes(policy)
    with Memory.open(policy).transaction() as db:
        before = dict(db.execute("SELECT name, hash FROM policy_keys"))
        if before != now:
            db.execute("DELETE FROM policy_keys")
            db.executemany("INSERT INTO policy_keys VALUES (?, ?)", now.items())
    return sorted(key for key in {*before, *now} if before and before.get(key) != now.get(key))


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
