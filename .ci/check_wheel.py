#!/usr/bin/env python3
"""What an installed wheel must show, outside of the checkout: the command, the C kernels, and every file it needs.

python .ci/check_wheel.py            exit code 0 if the environment's veilboost is whole
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

FILES = (
    "he_processors/py.typed",
    "dp_components/py.typed",
    "nvflare_plugins/py.typed",
    "nvflare_plugins/recipes/__init__.pyi",
    "veilboost/__init__.py",
    "veilboost/py.typed",
)


def main() -> int:
    """Check, and say what is missing."""
    distribution = metadata.distribution("veilboost")
    found = {str(path) for path in distribution.files or ()}
    missing = [*_missing_files(found), *_failed_commands()]
    foreign = [name for name in found if name.startswith(("tests/", "jobs/")) or name.endswith((".c", ".h"))]
    for text in missing:
        print(f"missing: {text}")
    for text in foreign:
        print(f"should not be there: {text}")
    return 1 if missing or foreign else 0


def _missing_files(found: set[str]) -> list[str]:
    missing = [name for name in FILES if name not in found]
    if not any(name.endswith(".cuh") for name in found):
        missing.append("he_processors/cuda/*.cuh")
    for extension in ("_bignum", "_curve", "_field", "_grids"):
        if not any(f"_native/{extension}." in name for name in found):
            missing.append(f"he_processors/_native/{extension}")
    if not any("growth/_native/_growth." in name for name in found):
        missing.append("nvflare_plugins/growth/_native/_growth")
    if not any("growth/_native/_float32." in name for name in found):
        missing.append("nvflare_plugins/growth/_native/_float32")
    return missing


def _failed_commands() -> list[str]:
    missing = []
    with tempfile.TemporaryDirectory() as folder:
        for code in (
            "-m nvflare_plugins --version",
            "-m nvflare_plugins site-setup ws",
            f"-c {_BACKENDS}",
            f"-c {_PAGES}",
        ):
            option, _, rest = code.partition(" ")
            command = [sys.executable, option, *([rest] if option == "-c" else rest.split())]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            print(done.stdout.strip())
            if done.returncode:
                missing.append(f"{code.split(';')[0]} ended with {done.returncode}: {done.stderr[-500:]}")
        if not (Path(folder) / "ws" / "local" / "veilboost.json").is_file():
            missing.append("site-setup wrote no policy")
    return missing


_BACKENDS = (
    "from he_processors import field61; from he_processors.bignum import registry; from he_processors.curve import "
    "registry as curves; import he_processors; print(he_processors.__file__); found = [registry.available_backends(), "
    "curves.available_backends(), field61.variants()]; print(found); assert all('portable' in one for one in found)"
)

_PAGES = (
    "from nvflare_plugins.pages.charts import environment; found = environment(); names = found.list_templates(); "
    "[found.get_template(name) for name in names]; print(names); assert 'base.html' in names and 'style.css' in names"
)

if __name__ == "__main__":
    sys.exit(main())
