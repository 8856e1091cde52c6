#!/usr/bin/env python3
"""What an installation stands on: its dependencies with versions and licences, from their own metadata.

    python .ci/dependencies.py lock          prints every dependency in its version, for `pip install -r`
    python .ci/dependencies.py lowest        prints the direct ones at the lower ends of their ranges, as constraints
    python .ci/dependencies.py licences      prints name, version and licence; 1 if one is unknown or not allowed

All are read from the environment that runs this, and nothing is fetched.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
NAME = "veilboost"
ALLOWED = (
    "Apache",
    "BSD",
    "MIT",
    "ISC",
    "PSF",
    "Python Software Foundation",
    "MPL-2.0",
    "Mozilla Public License 2.0",
    "LGPL",
    "GNU Lesser General Public License",
    "Unlicense",
    "Public Domain",
    "HPND",
    "CC0",
    "0BSD",
    "Zlib",
)
"""Licences under which a dependency may be installed beside this project; it ships with none of them."""
_NCCL = "XGBoost's wheel for Linux asks for it, and only its training on several GPUs, which is not used here, loads it"
KNOWN = {"nvidia-nccl-cu12": _NCCL, "nvidia-nccl-cu13": _NCCL}
"""Dependencies under terms that are not among those, with the reason why they are there all the same."""


def declared() -> list[Requirement]:
    """Return the project's own requirements, without extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(line) for line in project["dependencies"]]


def closure(requirements: list[Requirement]) -> dict[str, metadata.Distribution]:
    """Return everything that is installed because of requirements, by canonical name, in alphabetical order.

    Raises:
        metadata.PackageNotFoundError: one of them is not installed, and not known to be left out.
    """
    found: dict[str, metadata.Distribution] = {}
    waiting = [(requirement, frozenset(requirement.extras)) for requirement in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement, extras = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name in KNOWN and not is_installed(name):
            continue
        distribution = found.setdefault(name, metadata.distribution(name))
        for line in distribution.requires or ():
            needed = Requirement(line)
            if _applies(needed, extras):
                waiting.append((needed, frozenset(needed.extras)))
    return dict(sorted(found.items()))


def is_installed(name: str) -> bool:
    """Tell whether a distribution is there; install.py leaves NCCL out."""
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({"extra": extra}) for extra in (extras or {""}))


def lowest() -> Iterator[str]:
    """Yield each direct dependency at the lower end of its range, as pip reads it among constraints."""
    for requirement in declared():
        for one in requirement.specifier:
            if one.operator in (">=", "=="):
                yield f"{requirement.name}=={one.version}"


def licence(distribution: metadata.Distribution) -> str:
    """Return what a distribution says of its licence: an expression, classifiers, or the first line of a text."""
    said = distribution.metadata
    classified = [
        line.rpartition(" :: ")[2] for line in said.get_all("Classifier") or () if line.startswith("License ::")
    ]
    classified = [line for line in classified if line != "OSI Approved"]
    text = (said.get("License") or "").strip().partition("\n")[0]
    return said.get("License-Expression") or "; ".join(classified) or text[:80]


def is_allowed(text: str) -> bool:
    """Tell whether one of the licences that a text offers is among those allowed."""
    if re.search(r"(?<!Lesser )General Public License|(?<!L)GPL", text) and not re.search(r"LGPL|Lesser| OR ", text):
        return False
    return any(name.lower() in text.lower() for name in ALLOWED)


def main(arguments: list[str]) -> int:
    """Print what is asked for."""
    if arguments == ["lowest"]:
        print("\n".join(lowest()))
        return 0
    if arguments not in (["lock"], ["licences"]):
        print(__doc__, file=sys.stderr)
        return 2
    found = closure(declared())
    if arguments == ["lock"]:
        print(
            f"# Python {sys.version_info[0]}.{sys.version_info[1]} on {sys.platform}, made by .ci/dependencies.py lock"
        )
        print("\n".join(f"{name}=={distribution.version}" for name, distribution in found.items()))
        return 0
    wrong = 0
    for name, distribution in found.items():
        text = licence(distribution)
        mark = "" if is_allowed(text) else f"   ({KNOWN[name]})" if name in KNOWN else "   <- unknown or not allowed"
        wrong += mark.startswith("   <-")
        print(f"{name:32} {distribution.version:16} {text}{mark}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
