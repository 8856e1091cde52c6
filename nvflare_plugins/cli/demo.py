"""``veilboost demo``: the main job from data to report on one machine, beside centralized XGBoost."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.base.errors import DataRefusal, JobAborted
from nvflare_plugins.base.files import make_folder, write_atomically, write_private_table
from nvflare_plugins.base.formatting import printable, table_lines
from nvflare_plugins.cli.options import Options, as_data_set
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import Table, load_table
from nvflare_plugins.data.tabular_files import TabularFile
from nvflare_plugins.evidence.threat_model import CODEC_PROTECTION
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.pages.report import write_report
from nvflare_plugins.pages.run_record import FILE_NAME, Curve, RunRecord
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.site.policy_values import MIN_EFFECTIVE_ROWS
from nvflare_plugins.site.profiles import THREAT_MODELS
from nvflare_plugins.survey.columns import Use
from nvflare_plugins.survey.survey import survey
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.cuts import Cuts, reference_table

# ``veilboost demo``: the main job from data to report on one machine, beside centralized XGBoost.
#
# Three sites in FLARE's simulator, each its own process, train under the default profile on scikit-learn's breast
# cancer set or on a file of the user's. A third of the rows, or 100, is held out and scored after every round.


JOB_NAME, DATA_SET, EVAL_SET = "demo", "training", "evaluation"
N_SITES = 3
MAX_CLASSES, MAX_CATEGORIES = 20, 200
_SHOWN = re.compile(r"^(training with|agreed on|round \d+ of \d+|all sites ended)|failed|[Ee]rror|refuse")


@dataclass(frozen=True, slots=True)
class Task:
    """What kind of learning a label asks for, and how the demo scores it.

    Attributes:
        metric: name of the score on the pooled test set.
        federated_metric: XGBoost's name of the metric that the sites evaluate together.
    """

    params: dict[str, Any]
    metric: str
    federated_metric: str
    label_classes: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """Pooled training and test rows, as the sites hold them together."""

    train: pd.DataFrame
    test: pd.DataFrame
    label: str
    task: Task
    categories: dict[str, list[Any]]


def task_of(label: pd.Series) -> Task:
    """Choose objective and score from the label column.

    Raises:
        ConfigurationError: missing labels, text with too many values, or a single value.
    """
    if label.isna().any():
        raise ConfigurationError(f"the label column has {int(label.isna().sum())} missing values: remove those rows")
    values = sorted(label.unique().tolist())
    if len(values) < 2:
        raise ConfigurationError("the label column holds a single value: there is nothing to learn")
    is_text = not pd.api.types.is_numeric_dtype(label)
    if is_text and len(values) > MAX_CLASSES:
        raise ConfigurationError(f"the label column holds text with {len(values)} values; at most {MAX_CLASSES} work")
    classes = None if not is_text and values == list(range(len(values))) else values
    if len(values) == 2:
        return Task({"objective": "binary:logistic"}, "AUC", "auc", classes)
    if is_text or (len(values) <= MAX_CLASSES and all(float(v).is_integer() for v in values)):
        params = {"objective": "multi:softprob", "num_class": len(values)}
        return Task(params, "accuracy", "merror", classes)
    return Task({"objective": "reg:squarederror"}, "RMSE", "rmse")


def load(options: Options) -> tuple[pd.DataFrame, str]:
    """Return a table and its label column; what it found of the file and left out is printed.

    Raises:
        ConfigurationError: an unreadable file, or a label that is no column.
    """
    path, label = options.data, options.label
    if path is None:
        from sklearn.datasets import load_breast_cancer

        return load_breast_cancer(as_frame=True).frame, "target"
    if label is None:
        raise ConfigurationError("say which column is the label: LABEL=column")
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}: give another one (DATA=path/to/file.csv)")
    spec = as_data_set(options, path, DataSet(path.name, path.absolute(), "csv"), path.name)
    found = survey(spec, Use(label=label))
    problems = [one for one in found.findings if one.is_problem and not one.options]
    wrong = [one.text for one in problems if one.column in (None, label)]
    if wrong:
        raise ConfigurationError(f"{path.name}: {'; '.join(wrong)} (`veilboost check {path}` tells more)")
    draft = found.draft
    said: dict[str, Any] = dict(draft.options)
    spec = replace(spec, missing=tuple(said.pop("missing", spec.missing)), **said)
    frame = _frame(
        spec, [name for name in draft.features if name not in draft.categories], list(draft.categories), label
    )
    left_out = [name for name in TabularFile(spec).column_names if name not in frame]
    for what, told in (("read with", draft.options), ("left out (`veilboost check` says why):", left_out)):
        if told:
            print(printable(f"{path.name} is {what} {json.dumps(told, ensure_ascii=False)}", 2000))
    return frame, label


def _frame(spec: DataSet, numbers: list[str], texts: list[str], label: str) -> pd.DataFrame:
    """Return columns as a policy with these options reads them; the label as numbers, if all of it are."""
    file = TabularFile(spec)
    columns = file.read([*numbers, label], texts)
    absent = {"", *spec.missing}
    held: dict[str, Any] = {}
    for name in file.column_names:
        if name in texts:
            held[name] = [
                None if text is None or str(text) in absent else str(text) for text in columns[name].to_pylist()
            ]
        elif name in numbers or name == label:
            try:
                held[name] = file.numbers(name, columns[name])
            except DataRefusal:  # the label: all others were looked at
                held[name] = [None if text in absent else text for text in columns[name].to_pylist()]
    return pd.DataFrame(held)


def split(frame: pd.DataFrame, label: str) -> Split:
    """Hold out a third of the rows; text columns become categorical with the values seen as their public list."""
    task = task_of(frame[label])
    categories = {}
    for name in frame.columns.drop(label):
        if not pd.api.types.is_numeric_dtype(frame[name]) and not pd.api.types.is_bool_dtype(frame[name]):
            values = sorted(frame[name].dropna().astype(str).unique())
            if len(values) > MAX_CATEGORIES:
                raise ConfigurationError(f"column {name!r} holds text with {len(values)} values: drop or encode it")
            frame = frame.assign(**{name: frame[name].astype("string")})
            categories[name] = values
    shuffled = frame.sample(frac=1, random_state=0).reset_index(drop=True)
    # Sites ask for so many rows to train on, and for as many behind a metric.
    n_test = max(len(shuffled) // 3, min(MIN_EFFECTIVE_ROWS, len(shuffled) - MIN_EFFECTIVE_ROWS))
    if n_test < N_SITES:
        raise ConfigurationError(f"{len(frame)} rows are too few for {N_SITES} sites and a test set")
    return Split(shuffled.iloc[n_test:], shuffled.iloc[:n_test], label, task, categories)


def write_sites(data: Split, folder: Path) -> None:
    """Give every site its share of both sets."""
    make_folder(folder, is_new=True)
    for name, frame in ((DATA_SET, data.train), (EVAL_SET, data.test)):
        for number, rows in enumerate(np.array_split(np.arange(len(frame)), N_SITES), start=1):
            write_private_table(folder / f"site-{number}-{name}.parquet", frame.iloc[rows])


def make_job(data: Split, profile: str, num_rounds: int) -> HorizontalJob:
    """Return the demo's job."""
    params = {**data.task.params, "max_depth": 4, "eta": 0.3, "eval_metric": data.task.federated_metric}
    return HorizontalJob(
        DATA_SET,
        data.label,
        params,
        num_rounds,
        profile,
        eval_data_set=EVAL_SET,
        categories=data.categories,
        label_classes=data.task.label_classes,
    )


def simulate(folder: Path) -> None:
    """Run the job that lies in ``folder`` in FLARE's simulator (called in a process of its own)."""
    from nvflare.recipe import SimEnv

    from nvflare_plugins.recipes.recipe import HorizontalXGBRecipe
    from nvflare_plugins.site.setup import SetupOptions, set_up

    job = HorizontalJob.from_dict(json.loads((folder / "job.json").read_text()))
    paths = {name: str(folder / "data" / f"{{site}}-{name}.parquet") for name in (DATA_SET, EVAL_SET)}
    consents = ("plain_profile",) if job.profile == "plain" else ()
    wishes = SetupOptions(data_sets=paths, profiles=(job.profile,), consents=consents)
    set_up(folder / "simulator" / JOB_NAME, wishes)
    recipe = HorizontalXGBRecipe(JOB_NAME, **job.to_dict())
    recipe.execute(SimEnv(num_clients=N_SITES, workspace_root=str(folder / "simulator")))


def follow(folder: Path) -> None:
    """Start the simulator and show what a person wants to see of it.

    Raises:
        JobAborted: the job failed; the message names the log.
    """
    log = folder / "simulator.log"
    shown = set()
    with log.open("w") as output:
        command = [sys.executable, "-m", "nvflare_plugins.cli.demo", str(folder)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        with log.open() as lines:
            while True:
                ended = process.poll() is not None
                for line in lines:
                    text = line.split(" - ", 2)[-1].strip()
                    # The three sites say the same but for their seconds; one of them is enough.
                    told = _SHOWN.search(text)
                    if told and (told[0] if told.start() == 0 else text) not in shown:
                        shown.add(told[0] if told.start() == 0 else text)
                        print(f"  {text}", flush=True)
                if ended:
                    break
                time.sleep(0.3)
    if process.returncode != 0 or not list(folder.glob("simulator/demo/site-1/veilboost_runs/*/model.json")):
        raise JobAborted(f"the demo's job failed; the whole log is {log}")


def as_matrix(folder: Path, name: str, job: HorizontalJob) -> Table:
    """Return the rows of all sites as they present them to XGBoost, one site after the other."""
    tables = []
    for number in range(1, N_SITES + 1):
        spec = DataSet(name, folder / f"site-{number}-{name}.parquet", "parquet")
        tables.append(load_table(spec, label=job.label, categories=job.categories, label_classes=job.label_classes))
    features, label = (np.concatenate([getattr(one, part) for one in tables]) for part in ("features", "label"))
    return replace(tables[0], features=features, label=label)


def layout(table: Table) -> dict[str, Any]:
    """Return names and types of the features, for XGBoost's matrices."""
    return {
        "feature_names": list(table.feature_names),
        "feature_types": list(table.feature_types),
        "enable_categorical": True,
    }


def score(booster: xgb.Booster, rows: xgb.DMatrix, task: Task) -> list[float]:
    """Return the score on pooled rows after each round."""
    from sklearn.metrics import accuracy_score, roc_auc_score, root_mean_squared_error

    scores, truth = [], rows.get_label()
    for number in range(1, booster.num_boosted_rounds() + 1):
        predicted = booster.predict(rows, iteration_range=(0, number))
        if task.metric == "AUC":
            scores.append(float(roc_auc_score(truth, predicted)))
        elif task.metric == "accuracy":
            scores.append(float(accuracy_score(truth, predicted.argmax(axis=1))))
        else:
            scores.append(float(root_mean_squared_error(truth, predicted)))
    return scores


def run(options: Options) -> int:
    """Run it, and print how well it went."""
    data = split(*load(options))
    if min(len(data.train), len(data.test)) < MIN_EFFECTIVE_ROWS:
        raise ConfigurationError(
            f"{len(data.train) + len(data.test)} rows are too few: sites ask for {MIN_EFFECTIVE_ROWS} to train on and "
            "as many to test with unless told otherwise. Policy key: min_effective_rows."
        )
    folder = (options.runs / f"demo-{datetime.now():%Y%m%d-%H%M%S}").resolve()
    write_sites(data, folder / "data")
    job = make_job(data, options.profile, options.rounds)
    write_atomically(folder / "job.json", json.dumps(job.to_dict(), indent=1).encode())
    n_features = data.train.shape[1] - 1
    print(
        f"VeilBoost demo: {len(data.train)} training rows x {n_features} features over {N_SITES} sites, "
        f"{len(data.test)} test rows, profile {job.profile}"
    )
    print("Starting FLARE's simulator with one process per site (about 15 seconds) ...", flush=True)
    follow(folder)
    options.tell(**summarise(data, job, folder))
    return 0


if __name__ == "__main__":
    simulate(Path(sys.argv[1]))


# What the demo shows at its end: scores beside centralized XGBoost, time and bytes, protection, where things lie.


MAX_BIN = 256


def summarise(data: Split, job: HorizontalJob, folder: Path) -> dict[str, Any]:
    """Print the summary and write the report; return where things lie, and the scores after each round.

    Raises:
        ProtocolError: the evidence of the run does not verify.
    """
    (found,) = folder.glob(f"simulator/demo/site-1/veilboost_runs/*/{FILE_NAME}")
    run_folder = found.parent
    record = RunRecord.read(run_folder)
    if record.model is None:
        raise ProtocolError("the run of the demo has no model")
    model = run_folder / record.model
    booster = xgb.Booster(model_file=str(model))
    train, held_out = (as_matrix(folder / "data", name, job) for name in (DATA_SET, EVAL_SET))
    test = xgb.DMatrix(held_out.features, label=held_out.label, **layout(held_out))
    ours = score(booster, test, data.task)
    job = dataclasses.replace(job, params={**job.params, **_raised(record)})
    same_cuts = train_centrally(train, job, Cuts.from_lists(json.loads((run_folder / "cuts.json").read_text())))
    own_cuts = train_centrally(train, job, None)
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
    written = {"model": model, "report": report, "evidence": evidence, "log": folder / "simulator.log"}
    for what, path in written.items():
        print(f"  {what:<9} {path}")
    command = "veilboost" if shutil.which("veilboost") else sys.argv[0]  # make starts it without its environment
    if Path(command).name == "__main__.py":
        command = f"{sys.executable} -m nvflare_plugins"
    print(f"\nCheck the evidence yourself: {command} verify {evidence}")
    rows = folder / "data" / f"site-1-{EVAL_SET}.parquet"
    scored = f"{model} {rows} --ignore {shlex.quote(str(job.label))} --out {folder / 'scores.csv'}"
    print(f"Score rows with the model: {command} predict {scored} --explain")
    return {**written, "metric": data.task.metric, "scores": ours, "central_scores": central}


def _raised(record: RunRecord) -> dict[str, object]:
    """Return the parameter that the sites' policies have raised, with which centralized training is compared."""
    return {name: value for name, value in record.params.items() if name == "min_child_weight"}


def train_centrally(rows: Table, job: HorizontalJob, cuts: Cuts | None) -> xgb.Booster:
    """Train stock XGBoost on the pooled rows; with ``cuts`` None it sketches its own."""
    params = {**job.params, "tree_method": "hist", "max_bin": MAX_BIN, "nthread": 1, "eval_metric": []}
    common = {**layout(rows), "max_bin": MAX_BIN}
    reference = None
    if cuts is not None:
        lists = [rows.categories.get(name) for name in rows.feature_names]
        n_categories = {place: len(one) for place, one in enumerate(lists) if one is not None}
        reference = xgb.QuantileDMatrix(reference_table(cuts, n_categories), **common)
    matrix = xgb.QuantileDMatrix(rows.features, label=rows.label, ref=reference, **common)
    return xgb.train(params, matrix, job.num_rounds)


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
