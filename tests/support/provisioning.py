"""Startup kits as FLARE's ``provision`` writes them, without a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def provision(project: Path, folder: Path) -> Path:
    """Provision a project below a folder; return the folder of the kits."""
    copy = folder / "project.yml"
    shutil.copy(project, copy)
    command = [str(Path(sys.executable).with_name("nvflare")), "provision", "-p", str(copy), "-w", str(folder / "out")]
    environment = {**os.environ, "HOME": str(folder)}
    subprocess.run([*command, "--force"], env=environment, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    return next((folder / "out").glob("*/prod_00"))
