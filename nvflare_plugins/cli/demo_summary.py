"""What the demo shows at its end: scores beside centralized XGBoost, time and bytes, protection, where things lie."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xgboost as xgb

from he_processors.errors import ProtocolError
from nvflare_plugins.cli.demo import EVAL_SET, Split, columns, labels, layout, score
from nvflare_plugins.cli.verify import verify
from nvflare_plugins.evidence.threat_model import CODEC_PROTECTION, THREAT_MODELS
from nvflare_plugins.formatting import table_lines
from nvflare_plugins.horizontal.job import HorizontalJob
from nvflare_plugins.report.report import write_report
from nvflare_plugins.report.run_record import Curve, RunRecord
from nvflare_plugins.wire.catalogue import Kind
from nvflare_plugins.xgb.cuts import Cuts, reference_table

MAX_BIN = 256


def summarise(data: Split, job: HorizontalJob, folder: Path) -> None:
    """Print the summary and write the report.

    Raises:
        ProtocolError: the evidence of the run does not verify.
    """
    run_folder = next((folder / "simulator" / "demo" / "site-1" / "veilboost_runs").iterdir())
    record = RunRecord.read(run_folder)
    if record.model is None:
        raise ProtocolError("the run of the demo has no model")
    model = run_folder / record.model
    booster = xgb.Booster(model_file=str(model))
    test = xgb.DMatrix(columns(data.test, data), label=labels(data.test, data), **layout(data))
    ours = score(booster, test, data.task)
    job = dataclasses.replace(job, params={**job.params, **_raised(record)})
    same_cuts = train_centrally(data, job, Cuts.from_lists(json.loads((run_folder / "cuts.json").read_text())))
    own_cuts = train_centrally(data, job, None)
    central, stock = (score(other, test, data.task) for other in (same_cuts, own_cuts))
    _print_scores(data.task.metric, record, ours, central, stock)
    _print_difference(booster, same_cuts, test)
    for note in record.notes:
        print(note)
    _print_traffic(record)
    _print_protection(record)
    curve = Curve("centralized XGBoost, same cuts (pooled test set)", data.task.federated_metric, tuple(central))
    pooled = Curve("this model (pooled test set)", data.task.federated_metric, tuple(ours))
    if data.task.metric != "accuracy":  # the sites evaluate the error rate, which is another scale
        dataclasses.replace(record, comparison=(pooled, curve)).write(run_folder)
    report = write_report(run_folder)
    evidence = folder / "simulator" / "demo"
    outcome = verify([evidence])
    if not outcome.sound:
        raise ProtocolError(f"the evidence does not verify: see `veilboost verify {evidence}`")
    print("\nEvidence of all sites and the server agrees (UNSIGNED: the simulator has no certificates).\n")
    for what, path in (
        ("model", model),
        ("report", report),
        ("evidence", evidence),
        ("log", folder / "simulator.log"),
    ):
        print(f"  {what:<9} {path}")
    command = "veilboost" if shutil.which("veilboost") else sys.argv[0]  # make starts it without its environment
    if Path(command).name == "__main__.py":
        command = f"{sys.executable} -m nvflare_plugins"
    print(f"\nCheck the evidence yourself: {command} verify {evidence}")
    rows = folder / "data" / f"site-1-{EVAL_SET}.parquet"
    scored = f"{model} {rows} --ignore {shlex.quote(job.label)} --out {folder / 'scores.csv'}"
    print(f"Score rows with the model: {command} predict {scored} --explain")


def _raised(record: RunRecord) -> dict[str, object]:
    """Return the parameter that the sites' policies have raised, with which centralized training is compared."""
    return {name: value for name, value in record.params.items() if name == "min_child_weight"}


def train_centrally(data: Split, job: HorizontalJob, cuts: Cuts | None) -> xgb.Booster:
    """Train stock XGBoost on the pooled rows; with ``cuts`` None it sketches its own."""
    features, label = columns(data.train, data), labels(data.train, data)
    params = {**job.params, "tree_method": "hist", "max_bin": MAX_BIN, "nthread": 1, "eval_metric": []}
    common = {**layout(data), "max_bin": MAX_BIN}
    reference = None
    if cuts is not None:
        names = common["feature_names"]
        n_categories = {i: len(data.categories[name]) for i, name in enumerate(names) if name in data.categories}
        reference = xgb.QuantileDMatrix(reference_table(cuts, n_categories), **common)
    rows = xgb.QuantileDMatrix(features, label=label, ref=reference, **common)
    return xgb.train(params, rows, job.num_rounds)


def _print_scores(
    metric: str, record: RunRecord, ours: Sequence[float], central: Sequence[float], stock: Sequence[float]
) -> None:
    federated = [next(iter(row.metrics.values()), float("nan")) for row in record.rounds]
    name = next((key for row in record.rounds for key in row.metrics), "")
    local = f"{name.removeprefix('eval-')} by XGBoost"
    print(f"\n{metric} on the pooled test set after each round")
    _print_table(
        ("round", "federated", "central, same cuts", "central, own cuts", local, "seconds"),
        [
            (
                str(row.round + 1),
                f"{ours[i]:.5f}",
                f"{central[i]:.5f}",
                f"{stock[i]:.5f}",
                f"{federated[i]:.5f}",
                f"{row.seconds:.3f}",
            )
            for i, row in enumerate(record.rounds)
        ],
    )
    if name.endswith("auc"):
        print("XGBoost's own distributed AUC is a weighted mean of the sites' local AUCs, not the pooled AUC.")


def _print_difference(booster: xgb.Booster, central: xgb.Booster, test: xgb.DMatrix) -> None:
    difference = float(np.abs(booster.predict(test) - central.predict(test)).max())
    print(f"Largest difference of a test prediction from centralized XGBoost with the same cuts: {difference:.1e}")


def _print_traffic(record: RunRecord) -> None:
    print("\nWhat site-1 exchanged with the server")
    _print_table(
        ("message", "protection", "private", "messages", "bytes out", "bytes in", "seconds"),
        [
            (
                Kind[row.kind].meaning,
                row.codec,
                "yes" if row.private else "no",
                str(row.messages),
                f"{row.bytes_out:,}",
                f"{row.bytes_in:,}",
                f"{row.seconds:.3f}",
            )
            for row in record.traffic
        ],
    )
    n_rounds = max(len(record.rounds), 1)
    stages = {
        stage: sum(r.stages.get(stage, 0.0) for r in record.rounds) for stage in ("xgboost", "protect", "network")
    }
    print("Mean seconds a round: " + ", ".join(f"{name} {s / n_rounds:.4f}" for name, s in stages.items()))


def _print_protection(record: RunRecord) -> None:
    print("\nWhat was protected how")
    for codec in sorted({row.codec for row in record.traffic if row.private}):
        print(f"  {codec:<8} {CODEC_PROTECTION[codec]}")
    print("Who can learn what beyond the model:")
    for who, what in THREAT_MODELS[record.profile].rows():
        print(f"  {who + ':':<25} {what}")


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; columns of numbers stand flush right."""
    numeric = [i for i in range(len(header)) if all(row[i][:1].isdigit() for row in rows)]
    print("\n".join(f"  {line}" for line in table_lines([header, *rows], numeric, is_ruled=True)))
