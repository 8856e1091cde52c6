"""Small horizontal jobs for hostile sites and servers, and what has to be left after each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import VeilBoostError
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.wire.envelope import Frame, Kind, Operation, unpack
from tests.support.federation import Federation, SiteDied, Tamper
from tests.support.memories import states

Change = Callable[[Frame], Frame]
OF_OURS = [
    Kind.HANDSHAKE,
    Kind.GROUP_KEY,
    Kind.AGREEMENT,
    Kind.CUT_COUNTS,
    Kind.CUT_PLAN,
    Kind.SCALE,
    Kind.MODEL_CHECK,
    Kind.CLOSING,
]
OF_XGBOOST = [Kind.ROW_COUNT, Kind.ROOT_SUM]  # where it grows the trees
OF_TRAINING = [Kind.LABEL_MEAN, Kind.HISTOGRAM, Kind.HISTOGRAM_METRIC, Kind.METRIC]
KINDS = OF_OURS + OF_TRAINING + OF_XGBOOST
SEALED_OR_SIGNED = [Kind.HANDSHAKE, Kind.GROUP_KEY, Kind.AGREEMENT, Kind.CUT_PLAN, Kind.MODEL_CHECK]
OF_LATTICES = [Kind.HE_SECRET, Kind.HE_PUBLIC, Kind.CUT_COUNTS, Kind.HISTOGRAM]


def small_job(**fields) -> HorizontalJob:
    params = {"objective": "binary:logistic", "max_depth": 2, "max_bin": 8, "eval_metric": ["logloss", "auc"]}
    fields = {"params": params, "num_rounds": 2, "evaluate_training": True, **fields}
    return HorizontalJob("train", "y", **fields)


def job_with(kind: Kind) -> HorizontalJob:
    """Return a job in which messages of this kind travel; the search for cuts would be most of its time."""
    if kind in (Kind.CUT_COUNTS, Kind.CUT_PLAN):
        return small_job()
    engine = "xgboost" if kind in OF_XGBOOST else "auto"
    return small_job(cuts="uniform", cut_bounds={name: [-3.0, 3.0] for name in "abc"}, engine=engine)


def small_table(columns: str = "abc") -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(60, len(columns))).astype(np.float32), columns=list(columns))
    frame.iloc[::20] = np.nan  # no column is complete, so that the root sum travels
    return frame.assign(y=(np.nan_to_num(frame.iloc[:, 0]) > 0).astype(np.float32))


def at(kind: Kind, change: Callable[[bytes], bytes], occurrence: int = 1) -> Tamper:
    """Change one frame: the given occurrence of a kind."""
    seen = 0

    def tamper(data: bytes) -> bytes:
        nonlocal seen
        seen += unpack(data).kind is kind
        if seen == occurrence and unpack(data).kind is kind:
            seen += 1
            return change(data)
        return data

    return tamper


def on_frame(change: Change) -> Callable[[bytes], bytes]:
    return lambda data: change(unpack(data)).pack()


def with_fields(**fields) -> Callable[[bytes], bytes]:
    return on_frame(lambda frame: dataclasses.replace(frame, **fields))


def assert_failed_cleanly(federation: Federation, outcomes, job_id: str = "job") -> None:
    for site, outcome in outcomes.items():
        assert isinstance(outcome, (VeilBoostError, SiteDied)), f"{site}: {outcome!r}"
        assert "Traceback" not in str(outcome) and len(str(outcome)) < 5000
        folder = federation.workspace(site) / "runs" / job_id
        names = {path.name for path in folder.rglob("*")}
        assert not names & {"model.json", "run.json", "report.html"}
        assert not any(name.endswith(".partial") for name in names)
        for log in folder.glob("evidence/*.evidence.jsonl"):
            records = [json.loads(line) for line in log.read_text().splitlines()]
            assert [r["status"] for r in records if r["type"] == "end"] == ["aborted"]
        assert set(states(federation.workspace(site), site)) <= {"reserved"}


def everywhere(changes: dict, kinds: list[Kind], quick: str) -> list:
    """Return each change of each kind; quick are one change of all kinds, and all changes of histograms."""
    return [
        pytest.param(
            kind,
            what,
            id=f"{kind.name}-{what}",
            marks=[] if what == quick or kind is Kind.HISTOGRAM else [pytest.mark.slow],
        )
        for kind in kinds
        for what in changes
    ]


def private_frames(frames: list[tuple[str, bytes]]) -> list[str]:
    """Return the sums among the frames; what is sealed between sites holds names and keys, nothing of rows."""
    unpacked = [unpack(data) for _, data in frames]
    return [f.kind.name for f in unpacked if f.operation is Operation.SUM]
