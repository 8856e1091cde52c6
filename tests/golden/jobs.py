"""The small jobs behind the golden models: real data, whole sites in threads, randomness that repeats itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine

from nvflare_plugins.kinds.alignment.align import align_site
from nvflare_plugins.kinds.alignment.job import AlignmentJob
from nvflare_plugins.kinds.bagging.job import BaggingJob
from nvflare_plugins.kinds.bagging.training import run_bagging_site
from nvflare_plugins.kinds.dpboost.job import DpBoostJob
from nvflare_plugins.kinds.dpboost.server import DpBoostServer
from nvflare_plugins.kinds.dpboost.training import run_dpboost_site
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob
from nvflare_plugins.kinds.federboost_vertical.training import run_site as run_bucket_site
from nvflare_plugins.kinds.horizontal.site import run_site as run_horizontal_site
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.noisy_sums import TrustedServer
from nvflare_plugins.kinds.private_trees.training import run_private_trees_site
from nvflare_plugins.kinds.profile.job import ProfileJob
from nvflare_plugins.kinds.profile.site import run_profile_site
from nvflare_plugins.kinds.vertical.job import VerticalJob
from nvflare_plugins.kinds.vertical.site import run_vertical_site
from nvflare_plugins.kinds.vertical_inference.job import InferenceJob
from nvflare_plugins.kinds.vertical_inference.site import run_inference
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.site.memory.store import read_arrays
from tests.golden.injection import SERVER, as_party, at_site, repeated_randomness
from tests.support.federation import Parties, succeed

MODELS = Path(__file__).parent / "models"
JOB_ID = "golden"
CONSENTS = dict.fromkeys(
    ("plain_profile", "exact_cuts", "exact_bins", "recompute_with_changes", "explain", "merge_model"), True
)
POLICY = {
    "unsigned_sessions": True,
    "allowed_profiles": [
        "masks",
        "bfv",
        "ckks",
        "plain",
        "paillier",
        "elgamal",
        "dp_distributed",
        "dp_trusted",
        "dp_local",
    ],
    "consents": CONSENTS,
    "vertical": {"min_intersection": 1},
}
BUDGET = {"epsilon": 9.0, "delta": 1e-5}
PURE_BUDGET = {**BUDGET, "pure_epsilon": 8.0}


@dataclass(frozen=True)
class GoldenJob:
    """A job and what is kept of it.

    Attributes:
        run: runs the job in an empty folder and returns what it left, by file name.
        leaf_tolerance: leaves may differ by so much, relative to max(1, |leaf|); None demands equal bytes.
        is_slow: takes more than some seconds.
        needs_curve: computes on the curve, for which the C extension must have been built.
    """

    run: Callable[[Path], dict[str, bytes]]
    leaf_tolerance: float | None = None
    is_slow: bool = False
    needs_curve: bool = False


# -- data -------------------------------------------------------------------------------------------------------------


def breast(n_features: int = 8) -> pd.DataFrame:
    """Return Wisconsin's breast cancer data: 569 rows, the first mean features, label y of two classes."""
    data = load_breast_cancer()
    names = [name.replace(" ", "_") for name in data.feature_names[:n_features]]
    return pd.DataFrame(data.data[:, :n_features].astype(np.float32), columns=names).assign(y=data.target)


def wine() -> pd.DataFrame:
    """Return the wine data: 178 rows, 13 features, label y of three classes."""
    data = load_wine()
    return pd.DataFrame(data.data.astype(np.float32), columns=data.feature_names).assign(y=data.target)


def diabetes() -> pd.DataFrame:
    """Return the diabetes data: 442 rows, 10 features, label y from 25 to 346."""
    data = load_diabetes()
    return pd.DataFrame(data.data.astype(np.float32), columns=data.feature_names).assign(y=data.target)


def bounds_of(frame: pd.DataFrame) -> dict[str, list[float]]:
    """Return a round low and high for each feature; on this data they are public."""
    features = frame.drop(columns="y")
    return {name: [float(np.floor(column.min())), float(np.ceil(column.max()))] for name, column in features.items()}


def rows_over_sites(folder: Path, frame: pd.DataFrame, name: str = "rows", **facts: Any) -> Parties:
    """Deal the rows out to three sites in shares of 1/2, 1/3 and 1/6."""
    parties = Parties(folder, policy={"data_sets": {}, **POLICY})
    number = np.arange(len(frame)) % 6
    for site, mine in zip(parties.sites, (number < 3, (number >= 3) & (number < 5), number == 5), strict=True):
        parties.give(site, name, frame[mine], **facts)
    return parties


def columns_over_sites(
    folder: Path, frame: pd.DataFrame, name: str = "rows", shuffled: bool = False, person: str = "row"
) -> Parties:
    """Deal the columns out to three sites; the first has the label.

    Args: shuffled: other rows and orders at each site; person: what ids begin with.
    """
    parties = Parties(folder, policy={"data_sets": {}, **POLICY})
    names = [column for column in frame.columns if column != "y"]
    frame = frame.assign(id=[f"{person}-{number}" for number in range(len(frame))])
    for number, site in enumerate(parties.sites):
        own = ["id", *names[number::3], *(["y"] if number == 0 else [])]
        rows = frame
        if shuffled:
            rows = frame.drop(index=frame.index[20 * number : 20 * number + 20]).sample(frac=1, random_state=number)
        parties.give(site, name, rows[own], id="id")
    return parties


def describe_buckets(parties: Parties, frame: pd.DataFrame, name: str) -> None:
    """Give the passive parties what FederBoost asks of them: a budget, and what is public of their features."""
    bounds = bounds_of(frame)
    for number, site in enumerate(parties.sites[1:], start=1):
        policy = parties.policy_of(site)
        policy["data_sets"][name]["privacy"] = PURE_BUDGET
        parties.set_policy(site, **policy)
        own = {column: dict(zip(("low", "high"), bounds[column], strict=True)) for column in list(bounds)[number::3]}
        parties.give_input(site, "bucket_features.json", own)


# -- running ----------------------------------------------------------------------------------------------------------


def run_job(parties: Parties, run_site: Callable[..., Any], job: Any, server: Any = None, job_id: str = JOB_ID) -> None:
    """Run a job at all sites, and the server's answers to sums, with randomness that repeats itself."""
    on_sum = None
    with repeated_randomness():
        if server is not None:
            answer = as_party(SERVER, server(job, len(parties.sites)).answer)
            on_sum = lambda frame, total: answer(frame, total, lambda *spend: None)  # noqa: E731
        succeed(parties.run(at_site(run_site), job, job_id, on_sum))


def same_model(parties: Parties) -> dict[str, bytes]:
    """Return the model, which is the same bytes at every site."""
    models = {(parties.run_folder(site, JOB_ID) / "model.json").read_bytes() for site in parties.sites}
    if len(models) != 1:
        raise AssertionError("the sites' models differ")
    return {"model.json": models.pop()}


def parts(parties: Parties) -> dict[str, bytes]:
    """Return every party's part of a vertical model."""
    names = {"site-1": "vertical_model.json", "site-2": "private_table.json", "site-3": "private_table.json"}
    return {f"{site}.json": (parties.run_folder(site, JOB_ID) / name).read_bytes() for site, name in names.items()}


# -- kinds ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Horizontal:
    """Horizontal training, by stock XGBoost unless the job says otherwise: the model at every site."""

    profile: str = "masks"
    params: dict[str, Any] = field(default_factory=lambda: {"objective": "binary:logistic"})
    data: Callable[[], pd.DataFrame] = breast
    more: dict[str, Any] = field(default_factory=dict)

    def __call__(self, folder: Path) -> dict[str, bytes]:
        parties = rows_over_sites(folder, self.data())
        fields = {"data_set": "rows", "label": "y", "num_rounds": 4, "profile": self.profile}
        fields |= {"engine": "xgboost", **self.more}
        params = {"max_depth": 3, "eta": 0.3, "max_bin": 32, "min_child_weight": 4, **self.params}
        run_job(parties, run_horizontal_site, HorizontalJob.from_dict({**fields, "params": params}))
        return same_model(parties)


@dataclass(frozen=True)
class PrivateTrees:
    """Private trees: the model at every site."""

    more: dict[str, Any]
    data: Callable[[], pd.DataFrame] = breast

    def __call__(self, folder: Path) -> dict[str, bytes]:
        frame = self.data()
        parties = rows_over_sites(folder, frame, privacy=BUDGET)
        job = PrivateTreesJob.from_dict(
            {
                "data_set": "rows",
                "label": "y",
                "epsilon": 4.0,
                "delta": 1e-5,
                "feature_bounds": bounds_of(frame),
                "structure_seed": 7,
                **self.more,
            }
        )
        server = (lambda job, n: TrustedServer(JobPlan.of(job, n))) if job.trust == "trusted_aggregator" else None
        run_job(parties, run_private_trees_site, job, server)
        return same_model(parties)


def bagging(folder: Path) -> dict[str, bytes]:
    """Bagging: the model at every site. Columns are drawn, from the job's public seed; the sites draw nothing of it."""
    parties = rows_over_sites(folder, breast())
    for site in parties.sites:
        parties.set_policy(site, consents={**CONSENTS, "share_own_trees": True}, min_effective_rows=50)
    params = {"objective": "binary:logistic", "max_depth": 3, "eta": 0.3, "max_bin": 32, "colsample_bynode": 0.5}
    run_job(parties, run_bagging_site, BaggingJob("rows", "y", {**params, "seed": 3, "nthread": 1}, num_rounds=4))
    return same_model(parties)


def profile(folder: Path) -> dict[str, bytes]:
    """Profile: cut points, merged bins and counts at every site; the last digits of logarithms may differ."""
    parties = rows_over_sites(folder, breast(4))
    for site in parties.sites:
        parties.set_policy(site, consents={**CONSENTS, "feature_profile": True})
    run_job(parties, run_profile_site, ProfileJob("rows", "y", max_bin=32))
    (found,) = {(parties.run_folder(site, JOB_ID) / "profile.json").read_bytes() for site in parties.sites}
    features = {
        one["name"]: [[each["low"], each["high"], each["missing"], each["counts"]] for each in one["bins"]]
        for one in json.loads(found)["features"]
    }
    return {"profile.json": json.dumps(features, indent=1).encode()}


def dpboost(folder: Path) -> dict[str, bytes]:
    """DPBoost: the model at every site."""
    frame = breast()
    named = frame.assign(id=[f"row-{number}" for number in range(len(frame))])
    parties = rows_over_sites(folder, named, id="id", privacy=PURE_BUDGET)
    job = DpBoostJob.from_dict(
        {
            "data_set": "rows",
            "label": "y",
            "epsilon": 6.0,
            "feature_bounds": bounds_of(frame),
            "n_trees": 4,
            "trees_per_ensemble": 2,
            "depth": 2,
            "learning_rate": 0.3,
            "n_candidates": 8,
        }
    )
    run_job(parties, run_dpboost_site, job, lambda job, n: DpBoostServer(job))
    return same_model(parties)


def federboost_vertical(folder: Path) -> dict[str, bytes]:
    """FederBoost's vertical job: every party's part."""
    parties = columns_over_sites(folder, breast(6))
    describe_buckets(parties, breast(6), "rows")
    params = {"objective": "binary:logistic", "max_depth": 3}
    run_job(
        parties,
        run_bucket_site,
        BucketJob("rows", "site-1", "y", params=params, num_rounds=3, epsilon=6.0, edges_epsilon=0.0),
    )
    return parts(parties)


@dataclass(frozen=True)
class Vertical:
    """Vertical training: every party's part."""

    more: dict[str, Any]
    n_rows: int = 569

    def __call__(self, folder: Path) -> dict[str, bytes]:
        parties = columns_over_sites(folder, breast(6)[: self.n_rows])
        for site in parties.sites:
            parties.set_policy(site, min_key_bits=2048)
        job = VerticalJob.from_dict(
            {
                "active": "site-1",
                "data_set": "rows",
                "label": "y",
                "num_rounds": 3,
                "profile": "plain",
                "params": {"objective": "binary:logistic", "max_depth": 3, "max_bin": 16},
                "preset": "exact",
                **self.more,
            }
        )
        run_job(parties, run_vertical_site, job)
        return parts(parties)


@dataclass(frozen=True)
class Inference:
    """A use of the golden parts of ``vertical_plain``: the active party's result."""

    file: str
    more: dict[str, Any]

    def __call__(self, folder: Path) -> dict[str, bytes]:
        frame = breast(6)
        parties = columns_over_sites(folder, frame[:40], "new")
        trained = "vertical_plain"
        for site in parties.sites:
            (parties.workspace(site) / "inputs").mkdir()
            part = json.loads((MODELS / trained / f"{site}.json").read_bytes())
            (parties.workspace(site) / "inputs" / f"{part['job_id']}.{site}.json").write_text(json.dumps(part))
        run_job(parties, run_inference, InferenceJob(JOB_ID, **self.more))
        return {self.file: (parties.run_folder("site-1", JOB_ID) / self.file).read_bytes()}


def alignment(folder: Path) -> dict[str, bytes]:
    """Private alignment: positions at every site. The proof is the session's, which names the product's version."""
    parties = columns_over_sites(folder, breast(6)[:120], shuffled=True)
    run_job(parties, align_site, AlignmentJob(["rows"]))
    found = {}
    for site in parties.sites:
        stored = read_arrays(parties.run_folder(site, JOB_ID) / "alignment.npz")
        (facts,) = json.loads(stored["header"].tobytes())["data_sets"]
        del facts["proof"]
        found[site] = {**facts, "positions": stored["positions_0"].tolist()}
    return {"alignment.json": json.dumps(found, indent=None).encode()}


_PREDICT = {"data_set": "new", "file_format": "csv"}
_HISTOGRAMS = {"method": "feverless", "components": {"n_trees": 2, "depth": 3, "n_candidates": 8}}
_SHORT = {"key_bits": 2048, "num_rounds": 2, "preset": "guarded"}  # the shortest key that a policy can allow
_TRUSTED = {"trust": "trusted_aggregator"}
_NOVEMBER = {"method": "default_2026_11"}

JOBS: dict[str, GoldenJob] = {
    "grown_classes": GoldenJob(
        Horizontal(
            params={"objective": "multi:softprob", "num_class": 3, "colsample_bynode": 0.5},
            data=wine,
            more={"engine": "own", "arithmetic": "3.2"},
        )
    ),
    "grown_masks": GoldenJob(Horizontal(more={"engine": "own", "arithmetic": "3.4"})),
    "grown_regression": GoldenJob(
        Horizontal("bfv", {"objective": "reg:squarederror"}, diabetes, {"engine": "own", "arithmetic": "3.3"})
    ),
    "horizontal_masks": GoldenJob(Horizontal()),
    "horizontal_bfv": GoldenJob(Horizontal("bfv")),
    "horizontal_ckks": GoldenJob(Horizontal("ckks"), leaf_tolerance=1e-7),
    "horizontal_plain": GoldenJob(Horizontal("plain")),
    "horizontal_sampled": GoldenJob(
        Horizontal(params={"objective": "binary:logistic", "subsample": 0.5, "colsample_bylevel": 0.5, "seed": 3})
    ),
    "horizontal_classes": GoldenJob(
        Horizontal(params={"objective": "multi:softprob", "num_class": 3}, data=wine, more={"num_rounds": 2})
    ),
    "horizontal_regression": GoldenJob(Horizontal(params={"objective": "reg:squarederror"}, data=diabetes)),
    "private_trees_distributed": GoldenJob(PrivateTrees({**_NOVEMBER, "components": {"n_trees": 8}})),
    "private_trees_december": GoldenJob(PrivateTrees({"method": "default_2026_12", "components": {"n_trees": 24}})),
    "private_trees_trusted": GoldenJob(
        PrivateTrees({"method": "dp_tr_newton", "components": {"n_trees": 8}, **_TRUSTED})
    ),
    "private_trees_local": GoldenJob(
        PrivateTrees({**_NOVEMBER, "trust": "local", "n_rows": 569, "components": {"n_trees": 8}})
    ),
    "private_trees_histograms": GoldenJob(PrivateTrees(_HISTOGRAMS)),
    "private_trees_histograms_trusted": GoldenJob(PrivateTrees({**_HISTOGRAMS, **_TRUSTED})),
    "private_trees_classes": GoldenJob(
        PrivateTrees({"method": "default_2026_12", "components": {"n_trees": 8}, "label_classes": [0, 1, 2]}, data=wine)
    ),
    "private_trees_numbers": GoldenJob(
        PrivateTrees(
            {"method": "default_2026_12", "components": {"n_trees": 8}, "label_bounds": [0, 400]}, data=diabetes
        )
    ),
    "private_trees_ebm": GoldenJob(PrivateTrees({"method": "dp_ebm", "components": {"n_trees": 8}})),
    "bagging": GoldenJob(bagging),
    "profile": GoldenJob(profile),
    "dpboost": GoldenJob(dpboost),
    "federboost_vertical": GoldenJob(federboost_vertical),
    "vertical_plain": GoldenJob(Vertical({})),
    "vertical_guarded": GoldenJob(Vertical({"preset": "guarded"})),
    "vertical_sampled": GoldenJob(
        Vertical({"params": {"objective": "binary:logistic", "max_depth": 3, "max_bin": 16, "subsample": 0.5}})
    ),
    "vertical_paillier": GoldenJob(Vertical({"profile": "paillier", "key_bits": 3072}), is_slow=True),
    "vertical_paillier_short": GoldenJob(Vertical({"profile": "paillier", **_SHORT}, n_rows=200)),
    "vertical_elgamal": GoldenJob(Vertical({"profile": "elgamal"}, n_rows=200), needs_curve=True),
    "vertical_predict": GoldenJob(Inference("predictions.csv", _PREDICT)),
    "vertical_explain": GoldenJob(Inference("contributions.csv", {"action": "explain", **_PREDICT})),
    "vertical_merge": GoldenJob(Inference("merged_model.json", {"action": "merge"})),
    "alignment": GoldenJob(alignment),
}
