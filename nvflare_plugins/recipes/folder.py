"""Job folders, as ``nvflare simulator`` and ``nvflare job submit`` take them."""

from __future__ import annotations

import shutil
from pathlib import Path

from nvflare_plugins.recipes.job_recipe import JobRecipe


def write_folder(job: JobRecipe, folder: Path) -> Path:
    """Write a job's folder below a folder, replacing what was there under its name; return where it is."""
    path = folder / str(job.name)
    shutil.rmtree(path, ignore_errors=True)
    job.export(str(folder))
    return path
