"""A POC of three sites with a vertical model and new rows, and a job that stays over them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nvflare_plugins.kinds.vertical_inference.score_socket import SOCKET
from nvflare_plugins.recipes.recipe import VerticalInferenceRecipe, VerticalXGBRecipe, write_folder
from poc_workspace.run_poc import SITES, Poc
from tests.support.vertical_federation import Joined, federate
from tests.support.vertical_parts import parts_of, write_parts

N_TRAINING, WIDTH = 3_000, 8
PLACED = "trained-in-one-process"
ALIVE_S = 180.0


class ServingPoc(Poc):
    """Sites with columns of invented rows: those to train on, and others to score."""

    n_new = 1_500

    def _prepare(self) -> None:
        super()._prepare()
        random = np.random.default_rng(7)
        n_rows = N_TRAINING + self.n_new
        features = random.normal(size=(n_rows, WIDTH * len(SITES))).astype(np.float32)
        score = features @ random.normal(size=features.shape[1]) + features[:, 0] * features[:, WIDTH]
        label = (score + random.normal(size=n_rows) > 0).astype(int)
        ids = [f"customer-{number:05}" for number in range(n_rows)]
        for place, site in enumerate(SITES):
            names = [f"v{i}" for i in range(WIDTH * place, WIDTH * (place + 1))]
            table = pd.DataFrame(features[:, WIDTH * place : WIDTH * (place + 1)], columns=names)
            table.insert(0, "id", ids)
            if place == 0:
                table["label"] = label
            folder = self.folder / "data" / site
            table[:N_TRAINING].to_parquet(folder / "customers.parquet", index=False)
            new = table[N_TRAINING:].drop(columns="label", errors="ignore")
            new.sample(frac=1, random_state=place).to_parquet(folder / "new.parquet", index=False)
            self.set_policy(site)
        self._rows = (features[:N_TRAINING], label[:N_TRAINING].astype(np.float32))

    def place(self, rounds: int, depth: int) -> str:
        """Train in this process and give each site its part, as of a job; return that job's id."""
        features, label = self._rows
        params = {"objective": "binary:logistic", "max_depth": depth, "max_bin": 64}
        outcome = federate(Joined(features, label, (WIDTH,) * len(SITES)), params, rounds)
        active, passive = parts_of(outcome)
        named = dict(zip(SITES, (active, *passive.values()), strict=True))
        folders = {site: self.kits / site / "veilboost_runs" / PLACED for site in SITES}
        write_parts(folders, named, SITES[0], PLACED)
        for site, part in named.items():
            path = self.folder / "data" / site / "new.parquet"
            table = pd.read_parquet(path)
            table.columns = pd.Index(["id", *part.columns])
            table.to_parquet(path, index=False)
        return PLACED

    def set_policy(self, site: str, **changes: Any) -> None:
        """Write a site's policy: it consents to exact training and to standing scoring."""
        path = "../../../../data/{site}/%s.parquet"
        document = {
            "data_sets": {name: {"path": path % name, "id": "id"} for name in ("customers", "new")},
            "allowed_profiles": ["plain"],
            "consents": {"plain_profile": True, "exact_bins": True, "scoring": True},
            "vertical": {
                "max_sums_per_row": 1_000_000,
                "max_split_bits_per_row": 1_000_000,
                "max_bins": 256,
                "scoring_bits_per_row": 100_000,
                "scoring_alignments_per_day": 10,
            },
            **changes,
        }
        (self.kits / site / "local" / "veilboost.json").write_text(json.dumps(document))

    def train(self, rounds: int, depth: int) -> str:
        """Train in clear, since the model is all that matters here; return the job's id."""
        recipe = VerticalXGBRecipe(
            "train",
            active="site-1",
            data_set="customers",
            label="label",
            profile="plain",
            preset="exact",
            alignment="first",
            num_rounds=rounds,
            params={"objective": "binary:logistic", "max_depth": depth, "max_bin": 64},
        )
        job_id, status, result = self.run_job(write_folder(recipe, self.folder / "written"))
        if status != "FINISHED:COMPLETED":
            summary = json.loads(next(result.rglob("veilboost/summary.json")).read_text())
            raise RuntimeError(f"the training ended as {status}: {summary['reason']}")
        return job_id

    def serve(self, model: str, **fields: Any) -> str:
        """Submit a job that stays; return its id once it takes requests."""
        fields = {"alignment": "first", "batch_rows": 64, **fields}
        recipe = VerticalInferenceRecipe("serve", model=model, action="serve", data_set="new", **fields)
        folder = write_folder(recipe, self.folder / "written")
        with self.session() as session:
            job_id = str(session.submit_job(str(folder)))
        deadline = time.monotonic() + ALIVE_S
        while not self.socket(job_id).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} takes no requests")
            time.sleep(0.2)
        return job_id

    def socket(self, job_id: str) -> Path:
        """Return where a job takes requests."""
        return self.kits / "site-1" / "veilboost_runs" / job_id / SOCKET

    def end_of(self, job_id: str) -> tuple[str, Path]:
        """Wait for a job's end; return its status and the folder of its result."""
        with self.session() as session:
            _, meta = session.monitor_job_and_return_job_meta(job_id, timeout=ALIVE_S, poll_interval=0.5)
            return str(meta["status"]), Path(session.download_job_result(job_id, str(self.folder / "downloads")))
