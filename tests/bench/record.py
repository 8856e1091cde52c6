"""The one record of what benchmarks measured in full, ``measured.json``: figures, machine, load, commit, date, code.

A figure is stale where a module of its lane has changed since: where the files beside those modules that the run had
loaded have another hash now. Figures without commit and hash were measured before any were kept, and are stale too.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).with_name("measured.json")
_OURS = ("he_processors", "dp_components", "nvflare_plugins")
_CODE = (".py", ".c", ".h", ".cuh")
Kept = dict[str, dict[str, Any]]


def kept(path: Path = KEPT) -> Kept:
    """Return what was measured, by the program's name."""
    found: Kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def origin() -> dict[str, str]:
    """Return date, commit and machine of a figure that is measured now."""
    code = [f"*{ending}" for ending in _CODE]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": git("rev-parse", "--short=12", "HEAD")
        + ("+" if git("diff", "--shortstat", "HEAD", "--", *code) else ""),
        "machine": f"{_processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}",
    }


def lanes() -> list[str]:
    """Return the folders of our modules that this process has loaded, with those of their C sources."""
    files = [getattr(module, "__file__", None) for name, module in sys.modules.items() if name.split(".")[0] in _OURS]
    folders = {Path(file).resolve().parent for file in files if file}
    return sorted(str(folder.relative_to(ROOT)) for folder in folders if folder.is_relative_to(ROOT))


def hash_of(folders: Iterable[str]) -> str:
    """Return the SHA-256 of the code in some folders, without those below."""
    whole = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (ROOT / folder).glob("*") if path.suffix in _CODE):
        whole.update(f"{path.relative_to(ROOT)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def is_stale(entry: Mapping[str, Any]) -> bool:
    """Tell whether figures are of other code than there is now, or of unknown code."""
    return not entry.get("lanes") or hash_of(entry["lanes"]) != entry["sha256"]


def git(*arguments: str) -> str:
    """Return what git prints, "" where it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)  # noqa: S607
    return done.stdout.strip()


def _processor() -> str:
    """Return the processor's name, with what decides how fast big numbers are on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    said = {name.strip(): value for name, _, value in (line.partition(": ") for line in lines)}
    if "model name" not in said:
        return platform.processor() or platform.machine()
    ifma = "with" if "avx512ifma" in said.get("flags", "").split() else "without"
    return f"{said['model name']} (family {said.get('cpu family', 'unknown')}) {ifma} AVX512-IFMA"
