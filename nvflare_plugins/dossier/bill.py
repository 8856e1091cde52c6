"""The software bill of materials: what VeilBoost stands on in this installation, as CycloneDX JSON.

From the metadata of installed distributions alone: VeilBoost and everything that is installed because of it. Nothing is
fetched, and no path of this machine is told.

Reference: CycloneDX 1.6 (ECMA-424), bom-1.6.schema.json; package URLs: purl-spec, type pypi.
"""

from __future__ import annotations

import json
import platform
import re
from importlib import metadata
from typing import Any
from urllib.parse import quote

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

NAME = "veilboost"
_LONGEST_LICENCE = 120
_EXPRESSION = re.compile(r"[A-Za-z0-9.+() -]{1,120}")


def bill(created: str) -> bytes:
    """Return the bill. Args: created: ISO 8601 in UTC. Raises: metadata.PackageNotFoundError: no VeilBoost here."""
    found, edges = _closure(NAME)
    references = {name: f"pkg:pypi/{name}@{quote(one.version, safe='.-_~')}" for name, one in found.items()}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": created,
            "component": _component(NAME, found[NAME], references[NAME], "application"),
            "properties": [
                {"name": "python", "value": f"{platform.python_implementation()} {platform.python_version()}"},
                {"name": "system", "value": f"{platform.system()} {platform.machine()}"},
            ],
        },
        "components": [
            _component(name, found[name], references[name], "library") for name in sorted(found) if name != NAME
        ],
        "dependencies": [
            {"ref": references[name], "dependsOn": sorted(references[one] for one in edges[name])}
            for name in sorted(found)
        ],
    }
    return json.dumps(document, indent=1, sort_keys=True).encode()


def _closure(name: str) -> tuple[dict[str, metadata.Distribution], dict[str, set[str]]]:
    """Return what is installed because of a distribution, by canonical name, and which asks for which."""
    found = {name: metadata.distribution(name)}
    edges: dict[str, set[str]] = {name: set()}
    waiting: list[tuple[str, frozenset[str]]] = [(name, frozenset())]
    seen = set(waiting)
    while waiting:
        owner, extras = waiting.pop()
        for requirement in _requirements(found[owner], extras):
            needed = canonicalize_name(requirement.name)
            if needed not in found:
                try:
                    found[needed] = metadata.distribution(needed)
                except metadata.PackageNotFoundError:  # what is not here is not part of it
                    continue
                edges[needed] = set()
            if needed != owner:
                edges[owner].add(needed)
            following = (str(needed), frozenset(requirement.extras))
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return found, edges


def _requirements(distribution: metadata.Distribution, extras: frozenset[str]) -> list[Requirement]:
    found = []
    for line in distribution.requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": one}) for one in extras or {""}):
            found.append(requirement)
    return found


def _component(name: str, distribution: metadata.Distribution, reference: str, kind: str) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": kind,
        "bom-ref": reference,
        "name": name,
        "version": distribution.version,
        "purl": reference,
    }
    licence = _licence(distribution)
    return component | ({"licenses": [licence]} if licence else {})


def _licence(distribution: metadata.Distribution) -> dict[str, Any] | None:
    """Return what a distribution says of its licence: an SPDX expression, or its own words as a name."""
    said = distribution.metadata
    expression, own = (said[name] or "" if name in said else "" for name in ("License-Expression", "License"))
    if _EXPRESSION.fullmatch(expression):
        return {"expression": expression}
    lines = [line.rpartition(" :: ")[2] for line in said.get_all("Classifier") or () if line.startswith("License ::")]
    named = "; ".join(line for line in lines if line != "OSI Approved")
    text = named or own.strip().partition("\n")[0]
    return {"license": {"name": text[:_LONGEST_LICENCE]}} if text else None
