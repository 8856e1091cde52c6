"""``python -m tests.golden.write [KIND ...]`` writes golden models again; README.md says when that is right."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import xgboost as xgb

from tests.golden.jobs import JOBS, MODELS

MANIFEST = MODELS / "manifest.json"


def write(names: list[str]) -> None:
    """Run the jobs and write what they left, with its hashes."""
    manifest = json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {}
    if manifest.get("xgboost", xgb.__version__) != xgb.__version__ and set(names) != set(JOBS):
        sys.exit(f"the golden models are of XGBoost {manifest['xgboost']}: write all of them again, or none")
    files = manifest.get("files", {})
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found = JOBS[name].run(Path(folder))
        shutil.rmtree(MODELS / name, ignore_errors=True)
        (MODELS / name).mkdir(parents=True)
        for file, content in found.items():
            (MODELS / name / file).write_bytes(content)
        files[name] = {file: hashlib.sha256(content).hexdigest() for file, content in found.items()}
        print(f"{name}: {sum(map(len, found.values())):,} bytes")
    kept = {name: files[name] for name in sorted(files) if name in JOBS}
    MANIFEST.write_text(json.dumps({"xgboost": xgb.__version__, "files": kept}, indent=1) + "\n")


if __name__ == "__main__":
    unknown = sorted({*sys.argv[1:]} - {*JOBS})
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; there are {', '.join(JOBS)}")
    write(sys.argv[1:] or list(JOBS))
