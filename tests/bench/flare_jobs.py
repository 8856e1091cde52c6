"""A training as a job in FLARE's simulator: what processes, sessions, sealing, frames and evidence add to the work."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from nvflare_plugins.pages.run_record import RunRecord
from tests.bench.watched import Usage, watched

LABEL, DATA_SET, NAME = "label", "table", "bench"
_TIMEOUT_S = 4 * 3600


@dataclass(frozen=True)
class FlareRun:
    """One finished job. Units: seconds, bytes.

    Attributes:
        whole: what the command used, start and end of all processes included.
        rounds_s: of each round, at the first site.
        sent_bytes: by all sites.
    """

    whole: Usage
    rounds_s: tuple[float, ...]
    sent_bytes: int


def run_in_flare(kind: str, fields: Mapping[str, Any], tables: Sequence[pd.DataFrame]) -> FlareRun:
    """Run one job in a process of its own.

    Args:
        kind: "horizontal" or "vertical".
        fields: of the job, beside its data set and label.
        tables: of each site; a vertical job's label is the first one's.

    Raises:
        RuntimeError: the job failed, with the end of the simulator's log.
    """
    folder = Path(tempfile.mkdtemp(prefix="veilboost-flare-"))
    try:
        for number, table in enumerate(tables, 1):
            path = folder / "data" / f"site-{number}" / f"{DATA_SET}.parquet"
            path.parent.mkdir(parents=True)
            table.to_parquet(path)
        (folder / "job.json").write_text(json.dumps({"kind": kind, "fields": dict(fields), "sites": len(tables)}))
        command = [sys.executable, "-m", "tests.bench.flare_jobs", str(folder)]
        usage = watched(command, folder / "simulator.log", _TIMEOUT_S)
        found = sorted(folder.glob(f"workspaces/{NAME}/site-*/veilboost_runs/*/run.json"))
        if len(found) != len(tables):
            raise RuntimeError(f"the simulator failed:\n{(folder / 'simulator.log').read_text()[-3000:]}")
        runs = [RunRecord.read(path.parent) for path in found]
        sent = sum(row.bytes_out for run in runs for row in run.traffic)
        return FlareRun(usage, tuple(row.seconds for row in runs[0].rounds), sent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tables_of_parties(parts: Sequence[Any], label: Any) -> list[pd.DataFrame]:
    """Return each party's table: its columns under names that differ, and the label at the first."""
    tables, first = [], 0
    for columns in parts:
        tables.append(pd.DataFrame(columns, columns=[f"V{first + i}" for i in range(columns.shape[1])]))
        first += columns.shape[1]
    tables[0][LABEL] = label
    return tables


def _simulate(folder: Path) -> None:
    from nvflare.recipe import SimEnv

    from nvflare_plugins.recipes.recipe import HorizontalXGBRecipe, VerticalXGBRecipe
    from nvflare_plugins.site.setup import SetupOptions, set_up

    job = json.loads((folder / "job.json").read_text())
    fields = job["fields"]
    options = SetupOptions(
        {DATA_SET: str(folder / "data" / "{site}" / f"{DATA_SET}.parquet")},
        profiles=(fields["profile"],),
        consents=("plain_profile", *(("exact_bins",) if job["kind"] == "vertical" else ())),
    )
    set_up(folder / "workspaces" / NAME, options)
    if job["kind"] == "vertical":
        recipe: Any = VerticalXGBRecipe(NAME, active="site-1", data_set=DATA_SET, label=LABEL, **fields)
    else:
        recipe = HorizontalXGBRecipe(NAME, data_set=DATA_SET, label=LABEL, **fields)
    recipe.execute(SimEnv(num_clients=job["sites"], workspace_root=str(folder / "workspaces")))


if __name__ == "__main__":
    _simulate(Path(sys.argv[1]))
