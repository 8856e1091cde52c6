"""The software bill of materials: CycloneDX by its schema's rules, and true of this installation."""

from __future__ import annotations

import json
from importlib import metadata

import jsonschema

from nvflare_plugins.dossier.parts import bill

TEXT = {"type": "string", "minLength": 1}


def of(required: str, **properties: object) -> dict[str, object]:
    """Return the schema of an object that has these properties and no others."""
    return {
        "type": "object",
        "required": required.split(),
        "additionalProperties": False,
        "properties": {name.replace("_", "-"): one for name, one in properties.items()},
    }


def listed(items: object, **more: object) -> dict[str, object]:
    return {"type": "array", "items": items, **more}


LICENCE = {"oneOf": [of("license", license=of("name", name=TEXT)), of("expression", expression=TEXT)]}
COMPONENT = of(
    "type name version purl bom-ref",
    type={"enum": ["application", "library"]},
    name=TEXT,
    version=TEXT,
    bom_ref=TEXT,
    purl={"type": "string", "pattern": "^pkg:pypi/[a-z0-9][a-z0-9-]*@[A-Za-z0-9._%~-]+$"},
    licenses=listed(LICENCE, minItems=1),
)
METADATA = of(
    "timestamp component",
    timestamp={"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
    component=COMPONENT,
    properties=listed(of("name value", name=TEXT, value=TEXT)),
)
SCHEMA = of(
    "bomFormat specVersion version metadata components dependencies",
    bomFormat={"const": "CycloneDX"},
    specVersion={"const": "1.6"},
    version={"type": "integer", "minimum": 1},
    metadata=METADATA,
    components=listed(COMPONENT, uniqueItems=True),
    dependencies=listed(of("ref", ref=TEXT, dependsOn=listed(TEXT, uniqueItems=True)), uniqueItems=True),
)
"""The part of bom-1.6.schema.json that a bill uses, and nothing else; a bill was checked with the whole of it too."""


def test_it_keeps_the_schema_and_lists_what_is_installed() -> None:
    document = json.loads(bill("2026-11-22T20:00:00Z"))
    jsonschema.validate(document, SCHEMA)
    names = {one["name"]: one["version"] for one in document["components"]}
    for needed in ("xgboost", "nvflare", "numpy", "tenseal"):
        assert names[needed] == metadata.version(needed)
    assert "veilboost" not in names and document["metadata"]["component"]["version"] == metadata.version("veilboost")
    known = {one["bom-ref"] for one in [*document["components"], document["metadata"]["component"]]}
    assert {one["ref"] for one in document["dependencies"]} == known
    assert {ref for one in document["dependencies"] for ref in one["dependsOn"]} < known


def test_it_is_the_same_twice_and_tells_no_path() -> None:
    first = bill("2026-11-22T20:00:00Z")
    assert first == bill("2026-11-22T20:00:00Z")
    assert b"/home" not in first and b"site-packages" not in first and b"file:" not in first
