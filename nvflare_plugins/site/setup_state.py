"""What a set-up lacks (``veilboost site-setup --check``), and what it could have since an update (``--upgrade``).

Nothing here changes a file. What an update adds to policies (profiles, consents, limits) is only offered: each widens
what jobs may ask of a site, or narrows it, and both are the site's to decide.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from he_processors.errors import ConfigurationError
from nvflare_plugins.data_sets.declaration import VerticalRules
from nvflare_plugins.data_sets.part_files import known_files
from nvflare_plugins.declared import description_of
from nvflare_plugins.site.flare_boundary import Role, gaps
from nvflare_plugins.site.policy.policy import SitePolicy
from nvflare_plugins.site.policy.values import DEFAULT_PROFILES, POLICY_FILE, PROFILES, Consents
from nvflare_plugins.site.runtimes import run_gaps, site_name
from nvflare_plugins.site.setup import budget_gaps, check_place, here, leftover_gaps, workspaces

_SOON = timedelta(days=30)
_NOT_OFFERED = ("site", "workspace", "data_sets", "plugins", "consents", "vertical", "data_protection")


def missing(folder: Path) -> dict[Path, list[str]]:
    """Return what each workspace of a folder lacks before jobs can run there, one clause for each.

    Raises:
        ConfigurationError: the folder stands for no workspace, or FLARE could start no job in it.
    """
    check_place(folder)
    return {path: list(_missing(path, role)) for path, role in workspaces(folder)}


def policy_of(workspace: Path, role: Role) -> SitePolicy:
    """Return the policy of a workspace that is no server's. Raises: ConfigurationError."""
    return SitePolicy.load(workspace, "site" if role is Role.SIMULATOR else site_name(workspace))


def _missing(workspace: Path, role: Role) -> Iterator[str]:
    yield from gaps(workspace)
    yield from leftover_gaps(workspace, role)
    yield from _certificate_gaps(workspace, role)
    if role is Role.SERVER:
        return
    try:
        policy = policy_of(workspace, role)
        if role is Role.SITE:
            yield from run_gaps(workspace, policy)
    except ConfigurationError as error:
        yield str(error)
        return
    if not policy.data_sets:
        yield "the policy names no data set (--data-set NAME=PATH)"
    yield from budget_gaps(policy)
    for name, data_set in policy.data_sets.items():
        place = here(workspace, data_set.path) if role is Role.SITE else None  # a simulator has its sites in {site}
        if place is not None and not any(one.exists() for one in known_files(place)):
            yield f"data set {name!r}: there is no file {place}"


def _certificate_gaps(workspace: Path, role: Role) -> Iterator[str]:
    """Yield what is wrong with the certificate of a kit, or will be within a month."""
    path = workspace / "startup" / ("server.crt" if role is Role.SERVER else "client.crt")
    if role is Role.SIMULATOR or not path.is_file():
        return
    try:
        end = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except ValueError:
        yield f"{path} is no certificate"
        return
    if end - datetime.now(UTC) < _SOON:
        yield f"the certificate {path} ends on {end:%Y-%m-%d}: have the project's administrator renew it"


def offers(workspace: Path) -> list[str]:
    """Return what a site's policy could say and does not, one line for each; nothing for a workspace without policy."""
    path = workspace / POLICY_FILE
    if not path.is_file():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))  # SitePolicy.load has read it before
    lines = [
        f"{key} = {json.dumps(value)} unless said: {_first_sentence(description_of(cls, key.rpartition('.')[2]))}"
        for key, value, cls in _left_out(document)
    ]
    allowed = document.get("allowed_profiles", DEFAULT_PROFILES)
    lines += [f"profile {name} is not allowed: --add-profile {name}" for name in PROFILES if name not in allowed]
    return lines


def _left_out(document: dict[str, object]) -> Iterator[tuple[str, object, type]]:
    for prefix, cls, default in (
        ("", SitePolicy, SitePolicy("site", Path())),
        ("consents.", Consents, Consents()),
        ("vertical.", VerticalRules, VerticalRules()),
    ):
        part = document.get(prefix[:-1], {}) if prefix else document
        for field in dataclasses.fields(default):
            value = getattr(default, field.name)
            is_plain = isinstance(value, (bool, int, float, str)) and (prefix or field.name not in _NOT_OFFERED)
            if is_plain and isinstance(part, dict) and field.name not in part:
                yield f"{prefix}{field.name}", value, cls


def _first_sentence(text: str) -> str:
    text = " ".join(text.split())
    return text.partition(". ")[0].removesuffix(".") + "."
