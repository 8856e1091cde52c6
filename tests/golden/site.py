"""One site's memory after jobs of every kind, and jobs that it must then refuse or may still run."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from nvflare_plugins.kinds.alignment.align import align_site
from nvflare_plugins.kinds.alignment.job import AlignmentJob
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob
from nvflare_plugins.kinds.federboost_vertical.training import run_site as run_bucket_site
from nvflare_plugins.kinds.horizontal.site import run_site as run_horizontal_site
from nvflare_plugins.kinds.private_trees.job import PrivateTreesJob
from nvflare_plugins.kinds.private_trees.training import run_private_trees_site
from nvflare_plugins.kinds.vertical.job import VerticalJob
from nvflare_plugins.kinds.vertical.site import run_vertical_site
from nvflare_plugins.kinds.vertical_inference.job import InferenceJob
from nvflare_plugins.kinds.vertical_inference.site import run_inference
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.site.data_refusals import RefusalCount
from nvflare_plugins.site.memory.store import policy_changes
from nvflare_plugins.site.policy import SitePolicy
from tests.golden.jobs import (
    BUDGET,
    CONSENTS,
    bounds_of,
    breast,
    columns_over_sites,
    describe_buckets,
    rows_over_sites,
    run_job,
)
from tests.support.federation import Parties

SITE = "site-2"
REFUSED_AT_S = 1_795_330_800.0  # 2026-11-22, when this site refused for the last time
LOGISTIC = {"objective": "binary:logistic", "max_depth": 2, "max_bin": 16}
_KEPT = (".parquet", "run.json", "model.json", "cuts.json", "private_table.json", "alignment.npz")


def federation(folder: Path) -> Parties:
    """Return three sites that remember nothing, with a data set for each kind of job."""
    frame = breast(4)
    names = ["texture", "radius", "smoothness", "compactness", "area", "perimeter"]  # the site's columns divide rows
    few = breast(6)[::4][[*(f"mean_{name}" for name in names), "y"]]
    people = frame.assign(id=[f"patient-{number}" for number in range(len(frame))])
    parties = rows_over_sites(folder, people, "rows", id="id")
    rows_over_sites(folder, people, "patients", id="id", privacy=BUDGET)
    columns_over_sites(folder, few, "columns", person="worker")
    columns_over_sites(folder, few[:20], "new", person="applicant")
    columns_over_sites(folder, few, "people", shuffled=True, person="citizen")
    columns_over_sites(folder, few, "credit", person="debtor")
    describe_buckets(parties, few, "credit")
    columns_over_sites(folder, few, "loans", person="debtor")
    for site in parties.sites:
        parties.set_policy(
            site,
            consents={**CONSENTS, "recompute_with_changes": False},
            vertical={"min_intersection": 1, "predictions_per_row": 1},
        )
    return parties


def horizontal(**params: object) -> HorizontalJob:
    return HorizontalJob("rows", "y", {**LOGISTIC, "min_child_weight": 4, **params}, 2)


def private(epsilon: float) -> PrivateTreesJob:
    return PrivateTreesJob.from_dict(
        {
            "data_set": "patients",
            "label": "y",
            "epsilon": epsilon,
            "delta": 1e-5,
            "feature_bounds": bounds_of(breast(4)),
            "components": {"n_trees": 2},
        }
    )


def vertical(data_set: str) -> VerticalJob:
    return VerticalJob("site-1", data_set, "y", {**LOGISTIC, "max_depth": 3}, 3, profile="plain")


def buckets() -> BucketJob:
    return BucketJob("credit", "site-1", "y", params=LOGISTIC, num_rounds=1, epsilon=3.0)


PREDICT = InferenceJob("trained", data_set="new", file_format="csv")
ALIGN = AlignmentJob(["people"])


def write_site(folder: Path) -> None:
    """Run a job of every kind and write what the site keeps of them."""
    with tempfile.TemporaryDirectory() as sites:
        parties = federation(Path(sites))
        run_job(parties, run_horizontal_site, horizontal(), job_id="horizontal")
        run_job(parties, run_private_trees_site, private(4.0), job_id="private")
        run_job(parties, run_vertical_site, vertical("columns"), job_id="trained")
        run_job(parties, run_inference, PREDICT, job_id="predicted")
        run_job(parties, align_site, ALIGN, job_id="aligned")
        run_job(parties, run_bucket_site, buckets(), job_id="buckets")
        policy = SitePolicy.load(parties.workspace(SITE), SITE)
        RefusalCount(policy, lambda: REFUSED_AT_S).note(["rows", "patients"])
        policy_changes(policy)
        shutil.copytree(parties.workspace(SITE), folder, ignore=_not_kept)
    policy = folder / "local" / "veilboost.json"
    policy.write_text(json.dumps(json.loads(policy.read_text()), indent=1) + "\n")


def _not_kept(folder: str, names: list[str]) -> list[str]:
    """Leave out what is no memory: reports, evidence, locks."""
    is_run = Path(folder).parent.name == "runs"
    return [name for name in names if name == "lock" or name.endswith(".lock") or (is_run and name not in _KEPT)]
