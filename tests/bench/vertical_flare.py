"""The same training as a job in FLARE's simulator, in clear: what sessions, sealing, frames and evidence add."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import pandas as pd

from nvflare_plugins.pages.run_record import RunRecord
from tests.bench.vertical_parties import Workload

LABEL, DATA_SET, NAME = "label", "table", "vertical_bench"
_TIMEOUT_S = 900


def run_plain_job(workload: Workload) -> float:
    """Return the seconds of a round under profile plain, preset exact, two parties: median over rounds 2..n."""
    folder = Path(tempfile.mkdtemp(prefix="veilboost-vertical-"))
    try:
        _write(workload, folder)
        command = [sys.executable, "-m", "tests.bench.vertical_flare", str(folder)]
        log = folder / "simulator.log"
        with log.open("wb") as output:
            done = subprocess.run(command, stdout=output, stderr=output, check=False, timeout=_TIMEOUT_S)
        runs = sorted(folder.glob(f"workspaces/{NAME}/site-1/veilboost_runs/*/run.json"))
        if done.returncode != 0 or not runs:
            raise RuntimeError(f"the simulator failed:\n{log.read_text()[-3000:]}")
        rounds = RunRecord.read(runs[0].parent).rounds
        return median(row.seconds for row in rounds[1:] or rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(workload: Workload, folder: Path) -> None:
    start = 0
    for party, width in enumerate(workload.widths):
        names = [f"V{i}" for i in range(start, start + width)]
        table = pd.DataFrame(workload.part(party), columns=names)
        if party == 0:
            table[LABEL] = workload.label
        path = folder / "data" / f"site-{party + 1}" / f"{DATA_SET}.parquet"
        path.parent.mkdir(parents=True)
        table.to_parquet(path)
        start += width
    job = {"params": workload.params, "num_rounds": workload.num_rounds, "parties": len(workload.widths)}
    (folder / "job.json").write_text(json.dumps(job))


def _simulate(folder: Path) -> None:
    from nvflare.recipe import SimEnv

    from nvflare_plugins.recipes.recipe import VerticalXGBRecipe
    from nvflare_plugins.site.setup import SetupOptions, set_up

    job = json.loads((folder / "job.json").read_text())
    path = str(folder / "data" / "{site}" / f"{DATA_SET}.parquet")
    options = SetupOptions({DATA_SET: path}, profiles=("plain",), consents=("plain_profile", "exact_bins"))
    set_up(folder / "workspaces" / NAME, options)
    recipe = VerticalXGBRecipe(
        NAME,
        active="site-1",
        data_set=DATA_SET,
        label=LABEL,
        params=job["params"],
        num_rounds=job["num_rounds"],
        profile="plain",
        preset="exact",
        checkpoint_every=0,
    )
    recipe.execute(SimEnv(num_clients=job["parties"], workspace_root=str(folder / "workspaces")))


if __name__ == "__main__":
    _simulate(Path(sys.argv[1]))
