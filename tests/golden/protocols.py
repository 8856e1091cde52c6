"""What the protocol number of each kind of job stands for: `python -m tests.golden.protocols` writes `protocols.json`.

Recorded are digests of vectors of the wire, of golden models, and of defaults of jobs' fields, each with the kinds that
follow it. What is recorded stays as it is until all these kinds have a higher number; what is new is added.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvflare_plugins.attempt.site_attempt import _binding
from nvflare_plugins.flare.kinds import KINDS
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.site.protocols import PROTOCOLS
from tests.golden.write import MANIFEST
from tests.vectors.form import FOLDER

RECORD = Path(__file__).parent / "protocols.json"
ALL = tuple(sorted(KINDS))
_VERTICAL = ("vertical", "vertical_tuning")
_CONVERSING = (*_VERTICAL, "vertical_inference")
_RINGS = ("horizontal", "profile", "selection", "tuning")
_OF_FORMATS = {
    **dict.fromkeys(("ledger", "evidence", "seal"), ()),  # files: nobody sends them while a job runs
    **dict.fromkeys(("ring message", "ring parameters", "ring sum", "ring secret"), _RINGS),
    **dict.fromkeys(("points", "ciphertexts", "elgamal key", "public key"), _VERTICAL),
    **dict.fromkeys(("vertical terms", "vertical message", "step", "call"), _CONVERSING),
    **dict.fromkeys(("serving question", "serving answer", "positions"), ("vertical_inference",)),
    **dict.fromkeys(("chain", "blinded", "block"), ("alignment",)),
    "tree": ("bagging",),
    "buckets": ("federboost_vertical",),
}
"""Kinds that send a format of the vectors; a format that is not here is of all kinds."""
_OF_MODELS = {
    **dict.fromkeys(("grown", "horizontal"), ("horizontal", "selection", "tuning")),
    **dict.fromkeys(("vertical_explain", "vertical_merge", "vertical_predict"), ("vertical_inference",)),
    "vertical": _VERTICAL,
}
"""Kinds that make golden models whose names begin so, the longest beginning first; else the kind of that name."""

Parts = dict[str, dict[str, str]]
"""Kinds, joined by blanks -> name of a part -> its digest."""


def kinds_of_model(name: str) -> tuple[str, ...]:
    """Return the kinds that make a golden model."""
    start = next((one for one in sorted(_OF_MODELS, key=len, reverse=True) if name.startswith(one)), None)
    return _OF_MODELS[start] if start is not None else tuple(kind for kind in ALL if name.startswith(kind))


def parts() -> Parts:
    """Return what the numbers stand for now."""
    found: Parts = {}

    def note(kinds: tuple[str, ...], name: str, content: object) -> None:
        group = found.setdefault(" ".join(kinds), {})
        assert name not in group, name
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
        group[name] = digest.hexdigest()[:16]

    for path in sorted(FOLDER.glob("*.json")):
        for vector in json.loads(path.read_text(encoding="ascii"))["vectors"]:
            kinds = _OF_FORMATS.get(vector["format"], ALL)
            if kinds:
                note(kinds, f"{path.stem}: {vector['name']}", vector)
    place: Any = SimpleNamespace(sites=("a", "b"), number=2)
    note(ALL, "sessions: binding", _binding(HorizontalJob("rows", "y", num_rounds=3), place).hex())
    for name, files in json.loads(MANIFEST.read_text())["files"].items():
        for file, digest in files.items():
            note(kinds_of_model(name), f"model: {name}/{file}", digest)
    for kind, row in KINDS.items():
        for field in dataclasses.fields(row.job):
            made = field.default_factory is not dataclasses.MISSING
            default = field.default_factory() if made else field.default
            note((kind,), f"default: {field.name}", "none" if default is dataclasses.MISSING else [default])
    return found


def changed(recorded: Parts, now: Parts, numbers: Mapping[str, int]) -> list[str]:
    """Return what is not as recorded although some kind that follows it has the number that it had.

    Args:
        numbers: recorded numbers of kinds.
    """
    texts = []
    for group, digests in recorded.items():
        same = [kind for kind in group.split() if kind in PROTOCOLS and PROTOCOLS[kind].most == numbers[kind]]
        current = {} if not same else now.get(group, {})
        texts += [
            f"{name}, of protocol {numbers[same[0]]} of {', '.join(same)}"
            for name, digest in (digests if same else {}).items()
            if current.get(name) != digest
        ]
    return texts


def record() -> tuple[dict[str, int], Parts]:
    """Return the recorded numbers and parts."""
    document = json.loads(RECORD.read_text())
    return document["protocols"], document["parts"]


def main() -> str | None:
    """Add what is new; return what forbids it."""
    now = parts()
    if RECORD.is_file():
        numbers, recorded = record()
        wrong = changed(recorded, now, numbers)
        if wrong:
            return "\n".join(["raise the numbers of these kinds in nvflare_plugins/site/protocols.py first:", *wrong])
    document = {"protocols": {kind: PROTOCOLS[kind].most for kind in ALL}, "parts": now}
    RECORD.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return None


if __name__ == "__main__":
    sys.exit(main())
