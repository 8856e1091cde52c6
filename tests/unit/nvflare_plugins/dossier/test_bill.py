"""The software bill of materials: CycloneDX by its schema's rules, and true of this installation."""

from __future__ import annotations

import json
from importlib import metadata

import jsonschema

from nvflare_plugins.dossier.bill import bill

_TEXT = {"type": "string", "minLength": 1}
_LICENCES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "oneOf": [
            {
                "type": "object",
                "required": ["license"],
                "additionalProperties": False,
                "properties": {"license": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}}},
            },
            {
                "type": "object",
                "required": ["expression"],
                "additionalProperties": False,
                "properties": {"expression": _TEXT},
            },
        ]
    },
}
_COMPONENT = {
    "type": "object",
    "required": ["type", "name", "version", "purl", "bom-ref"],
    "additionalProperties": False,
    "properties": {
        "type": {"enum": ["application", "library"]},
        "name": _TEXT,
        "version": _TEXT,
        "bom-ref": _TEXT,
        "purl": {"type": "string", "pattern": "^pkg:pypi/[a-z0-9][a-z0-9-]*@[A-Za-z0-9._%~-]+$"},
        "licenses": _LICENCES,
    },
}
SCHEMA = {
    "type": "object",
    "required": ["bomFormat", "specVersion", "version", "metadata", "components", "dependencies"],
    "additionalProperties": False,
    "properties": {
        "bomFormat": {"const": "CycloneDX"},
        "specVersion": {"const": "1.6"},
        "version": {"type": "integer", "minimum": 1},
        "metadata": {
            "type": "object",
            "required": ["timestamp", "component"],
            "additionalProperties": False,
            "properties": {
                "timestamp": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
                "component": _COMPONENT,
                "properties": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name", "value"],
                        "additionalProperties": False,
                        "properties": {"name": _TEXT, "value": _TEXT},
                    },
                },
            },
        },
        "components": {"type": "array", "uniqueItems": True, "items": _COMPONENT},
        "dependencies": {
            "type": "array",
            "uniqueItems": True,
            "items": {
                "type": "object",
                "required": ["ref"],
                "additionalProperties": False,
                "properties": {"ref": _TEXT, "dependsOn": {"type": "array", "uniqueItems": True, "items": _TEXT}},
            },
        },
    },
}
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
