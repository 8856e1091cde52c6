"""The jobs of this folder: run one over three simulated sites, or write the job folders anew.

    python jobs/examples.py NAME --workspace DIR     writes the sites' data to DIR/data and runs the job in DIR/NAME
    python jobs/examples.py NAME --data DIR          only the sites' files, and what their policies must say
    python jobs/examples.py --write                  writes all job folders, jobs/NAME/

A job folder is what ``nvflare simulator`` and ``nvflare job submit`` take as it stands. The data are scikit-learn's
breast cancer set or invented; ``--file`` takes a table of your own (CSV or Parquet) for vertical jobs, with a column
``label`` for ``tuning``, and with the columns of the UCI set "default of credit card clients" for private trees. A
workspace that has a policy is used as it stands, unless there is such a file.

``vertical_predict``, ``vertical_explain`` and ``vertical_merge`` use the model of ``vertical_paillier`` in the same
DIR, or of the training that ``--training`` names: run that first. The simulator calls every job simulate_job and starts
with empty sites, so parts of the model are placed in the sites' input folder first. Elsewhere every site still has its
part in its run folder; only the id of the training job must be named: ``--write --model JOB_ID``.

With ``--workers`` site-2 has a Dask cluster of its own, with so many workers on this machine (the extra ``cluster``);
jobs/CLUSTER.md says how to have a real one.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import pandas as pd
from nvflare.recipe import SimEnv

from he_processors.errors import ConfigurationError
from nvflare_plugins import recipes
from nvflare_plugins.base.files import make_folder
from nvflare_plugins.kinds.vertical.model import ACTIVE_FILE, PASSIVE_FILE
from nvflare_plugins.recipes import examples as made
from nvflare_plugins.recipes.recipe import write_folder
from nvflare_plugins.site.policy_values import FOLDERS, POLICY_FILE
from nvflare_plugins.site.setup import SetupOptions, set_up

FOLDER = Path(__file__).resolve().parent
TRAINING = "vertical_paillier"


# -- the sites' data --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """What the sites' data are made of.

    Attributes:
        rows: a table of the caller's own; None for breast cancer or invented rows.
        label: the column of a vertical job's label.
        n_sites: how many parties share the columns of a vertical job.
    """

    rows: pd.DataFrame | None = None
    label: str = made.LABEL
    n_sites: int = len(made.SITES)

    def folders(self, folder: Path) -> list[Path]:
        """Return each site's folder below one."""
        return [folder / f"site-{number + 1}" for number in range(self.n_sites)]


DataSets = dict[str, dict[str, Any]]
"""Names of data sets -> what the sites' policies say of them."""


def _named(folder: Path, *names: str) -> DataSets:
    known = made.data_sets(folder)
    return {name: known[name] for name in names}


def _invented(write: Callable[[Sequence[Path]], None], *names: str) -> Callable[[Path, Table], DataSets]:
    """Return what writes rows that no table of the caller's replaces, of data sets of these names."""

    def data(folder: Path, table: Table) -> DataSets:
        write(table.folders(folder))
        return _named(folder, *names)

    return data


def _rows(folder: Path, table: Table) -> DataSets:
    made.deal_rows(made.breast_cancer(), table.folders(folder), "breast")
    return {"breast": {"path": str(folder.absolute() / "{site}" / "breast.csv")}}


def _columns(folder: Path, table: Table) -> DataSets:
    rows = made.breast_cancer() if table.rows is None else table.rows
    if table.label not in rows:
        raise ConfigurationError(f"the table has no column {table.label!r}: name its label with --label")
    made.deal_columns(rows, table.label, table.folders(folder))
    return _named(folder, *made.DATA_SETS)


def _columns_of_training(folder: Path, table: Table) -> DataSets:
    return _named(folder, made.DATA_SETS[1])


def _loans(folder: Path, table: Table) -> DataSets:
    rows = made.invented_credit(6_000) if table.rows is None else table.rows
    made.write_credit(rows, table.folders(folder), made.LOANS)
    return _named(folder, made.LOANS)


def _credit(folder: Path, table: Table) -> DataSets:
    rows = made.invented_credit() if table.rows is None else table.rows
    lacking = [name for name in (*made.CREDIT_BOUNDS, "label") if name not in rows]
    if lacking:
        raise ConfigurationError(f"the table lacks the columns {', '.join(lacking)}")
    made.write_credit(rows, table.folders(folder), made.CREDIT)
    return {made.CREDIT: {**made.data_sets(folder)[made.CREDIT], "privacy": {"epsilon": 2.0, "delta": 1e-5}}}


# -- the jobs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Example:
    """A job of this folder.

    Attributes:
        recipe: makes the job, of its name and further fields.
        data: writes the sites' data below a folder.
        policy: what a site's policy must say beside where the data are; ``{data}`` stands for their folder.
    """

    recipe: Callable[..., recipes.JobRecipe]
    data: Callable[[Path, Table], DataSets]
    policy: Mapping[str, Any] = field(default_factory=dict)


def _vertical(profile: str, preset: str, *consents: str) -> Example:
    recipe = partial(
        recipes.VerticalXGBRecipe,
        active="site-1",
        data_set=made.DATA_SETS[0],
        eval_data_set=made.DATA_SETS[1],
        label=made.LABEL,
        alignment="first",
        params={
            "objective": "binary:logistic",
            "eval_metric": ["logloss", "auc"],
            "max_depth": 3,
            "eta": 0.3,
            "max_bin": 32,
        },
        num_rounds=5,
        profile=profile,
        preset=preset,
    )
    return Example(recipe, _columns, {"allowed_profiles": [profile], "consents": dict.fromkeys(consents, True)})


def _horizontal_under(profile: str, **policy: Any) -> Example:
    recipe = partial(
        recipes.HorizontalXGBRecipe,
        data_set="breast",
        eval_data_set="breast_test",
        label="target",
        params={"objective": "binary:logistic", "eval_metric": ["auc", "logloss"], "max_depth": 3, "eta": 0.3},
        num_rounds=10,
        profile=profile,
    )
    return Example(recipe, _invented(made.write_breast_cancer, "breast", "breast_test"), policy)


def _private_trees(method: str, trust: str, profile: str) -> Example:
    recipe = partial(
        recipes.PrivateTreesRecipe,
        data_set=made.CREDIT,
        label="label",
        epsilon=0.5,
        delta=1e-6,
        feature_bounds=made.CREDIT_BOUNDS,
        method=method,
        trust=trust,
    )
    return Example(recipe, _credit, {"allowed_profiles": [profile]})


def _inference(action: str, *consents: str) -> Example:
    rows: dict[str, Any] = {} if action == "merge" else {"data_set": made.DATA_SETS[1], "alignment": "first"}
    recipe = partial(recipes.VerticalInferenceRecipe, model=made.SIMULATED, action=action, **rows)
    return Example(recipe, _columns_of_training, {"consents": dict.fromkeys(consents, True)})


_PLAIN = {"allowed_profiles": ["plain"], "consents": {"plain_profile": True}}
EXAMPLES: dict[str, Example] = {
    "horizontal_masks": _horizontal_under("masks"),
    "horizontal_bfv": _horizontal_under("bfv"),
    "horizontal_ckks": _horizontal_under("ckks"),
    "horizontal_plain": _horizontal_under("plain", **_PLAIN),
    "survival": Example(
        partial(
            recipes.HorizontalXGBRecipe,
            data_set=made.STAYS,
            eval_data_set=made.STAYS_TEST,
            label={"time": "days", "event": "readmitted"},
            params={"objective": "survival:aft", "eval_metric": "aft-nloglik", "base_score": 180.0, "max_depth": 3},
            num_rounds=20,
        ),
        _invented(made.write_stays, made.STAYS, made.STAYS_TEST),
    ),
    "ranking": Example(
        partial(
            recipes.HorizontalXGBRecipe,
            data_set=made.SEARCHES,
            eval_data_set=made.SEARCHES_TEST,
            label="relevance",
            query="search",
            params={"objective": "rank:ndcg", "eval_metric": ["ndcg@5", "ndcg"], "max_depth": 3, "eta": 0.3},
            num_rounds=20,
        ),
        _invented(made.write_searches, made.SEARCHES, made.SEARCHES_TEST),
    ),
    # The preset exact equals centralized training, and every passive party's policy must consent to it.
    "vertical_paillier": _vertical("paillier", "exact", "exact_bins"),
    "vertical_elgamal": _vertical("elgamal", "exact", "exact_bins"),  # the faster scheme, on a curve
    "vertical_guarded": _vertical("paillier", "guarded"),  # what policies allow by default; wants thousands of rows
    "vertical_plain": _vertical("plain", "exact", "exact_bins", "plain_profile"),
    "vertical_predict": _inference("predict"),
    "vertical_explain": _inference("explain", "explain"),
    "vertical_merge": _inference("merge", "merge_model"),
    "alignment": Example(partial(recipes.AlignmentRecipe, data_sets=made.DATA_SETS), _columns),
    "private_trees_default": _private_trees("default", "distributed", "dp_distributed"),
    "private_trees_dp_ebm": _private_trees("dp_ebm_newton", "trusted_aggregator", "dp_trusted"),
    "bagging": Example(
        partial(
            recipes.BaggingXGBRecipe,
            data_set="breast",
            label="target",
            params={"objective": "binary:logistic", "max_depth": 3, "eta": 0.3},
            num_rounds=10,
        ),
        _rows,
        {"consents": {"share_own_trees": True}},
    ),
    "profile": Example(
        partial(recipes.ProfileRecipe, data_set="breast", label="target"),
        _rows,
        {"consents": {"feature_profile": True}},
    ),
    "selection": Example(
        partial(
            recipes.SelectionRecipe,
            data_set=made.LOANS,
            label="label",
            params={"objective": "binary:logistic", "eval_metric": "auc", "max_bin": 64, "max_depth": 3},
            folds=4,
            num_rounds=20,
        ),
        _loans,
        {"consents": {"tuning": 10_000, "feature_profile": True}},
    ),
    "tuning": Example(
        partial(
            recipes.TuningRecipe,
            data_set=made.LOANS,
            label="label",
            params={"objective": "binary:logistic", "eval_metric": "logloss", "max_bin": 64},
            search={
                "eta": {"low": 0.03, "high": 0.3, "log": True},
                "max_depth": [2, 3, 4, 5],
                "lambda": {"low": 0.1, "high": 10.0, "log": True},
                "colsample_bytree": [0.6, 0.8, 1.0],
            },
            n_trials=8,
            folds=5,
            num_rounds=50,
            early_stopping_rounds=10,
        ),
        _loans,
        {"consents": {"tuning": 8 * 5 * 50}},
    ),
    "vertical_tuning": Example(
        partial(
            recipes.VerticalTuningRecipe,
            active=made.SITES[0],
            data_set=made.LOAN_COLUMNS,
            label="label",
            alignment="first",
            params={"objective": "binary:logistic", "eval_metric": "logloss", "max_bin": 32},
            trials=[{"eta": 0.3, "max_depth": 2}, {"eta": 0.3, "max_depth": 3}, {"eta": 0.6, "max_depth": 2}],
            folds=3,
            num_rounds=5,
            profile="elgamal",
        ),
        _invented(made.write_loan_columns, made.LOAN_COLUMNS),
        {"allowed_profiles": ["elgamal"], "consents": {"exact_bins": True, "tuning": 3 * 3 * 5}},
    ),
    # Few features with round public bounds, few and flat trees, as few rows ask for.
    "dpboost": Example(
        partial(
            recipes.DpBoostRecipe,
            data_set=made.PATIENTS,
            label="target",
            epsilon=4.0,
            feature_bounds=made.PATIENT_BOUNDS,
            n_trees=10,
            depth=3,
            trees_per_ensemble=5,
            learning_rate=0.3,
            n_candidates=16,
        ),
        _invented(made.write_patients, made.PATIENTS),
        {"allowed_profiles": ["dp_trusted"]},
    ),
    # The consent is for the active party alone, which simulated sites share their policy with: nothing protects its
    # labels.
    "federboost_vertical": Example(
        partial(
            recipes.FederBoostVerticalRecipe,
            data_set=made.PARTS,
            active=made.SITES[0],
            label="target",
            epsilon=4.0,
            num_rounds=20,
            params={"objective": "binary:logistic", "max_depth": 3, "eta": 0.3},
        ),
        _invented(made.write_parts, made.PARTS, made.PARTS_TEST),
        {"allowed_profiles": ["dp_local"], "consents": {"exact_use_of_budgeted_data": True}, "inputs": "{data}/{site}"},
    ),
}


def recipe(name: str, **changes: Any) -> recipes.JobRecipe:
    """Return the job of a folder, with other values of some fields."""
    return EXAMPLES[name].recipe(name, **changes)


def write_data(name: str, folder: Path, table: Table = Table()) -> dict[str, Any]:
    """Write the sites' data below a folder; return what their policies must say."""
    example = EXAMPLES[name]
    keys = {key: value for key, value in example.policy.items() if value}
    if "inputs" in keys:
        keys["inputs"] = keys["inputs"].replace("{data}", str(folder.absolute()))
    return {"data_sets": example.data(folder, table), **keys}


def prepare(name: str, root: Path, table: Table = Table()) -> Path:
    """Write the sites' data to ``root``/data and set up the simulator's workspace of a job, which is returned.

    A workspace that has a policy stays as it is, unless there is a table of the caller's own.
    """
    workspace = root / name
    if table.rows is not None or not (workspace / POLICY_FILE).is_file():
        set_up(workspace, SetupOptions(policy=write_data(name, root / "data", table)))
    return workspace


def place_parts(training: Path, inputs: Path) -> None:
    """Copy every site's part of a model that was trained in a simulator workspace into an input folder.

    Raises:
        ConfigurationError: no model was trained there.
    """
    runs = {
        path.parents[2].name: path.parent for path in training.glob(f"*/{FOLDERS['runs']}/{made.SIMULATED}/policy.json")
    }
    if not runs:
        raise ConfigurationError(
            f"{training} holds no trained model. Remedy: run the training in this workspace first, or name another "
            "one's folder there as --training"
        )
    make_folder(inputs)
    for site, run in runs.items():
        part = run / ACTIVE_FILE if (run / ACTIVE_FILE).exists() else run / PASSIVE_FILE
        shutil.copy(part, inputs / f"{made.SIMULATED}.{site}.json")


# -- the command ------------------------------------------------------------------------------------------------------


@click.command(help=(__doc__ or "").replace("\n\n", "\n\n\b\n"))
@click.argument("name", metavar="[NAME]", type=click.Choice(list(EXAMPLES)), required=False, help=", ".join(EXAMPLES))
@click.option("--workspace", metavar="DIR", type=Path, help="run the job in the simulator, below this folder")
@click.option("--file", metavar="FILE", type=Path, help="a table of your own for all sites")
@click.option("--label", default=made.LABEL, help="label column of the table of a vertical job")
@click.option(
    "--parties", type=int, default=len(made.SITES), help="parties to deal a vertical job's columns to; default 3"
)
@click.option("--workers", type=int, metavar="N", help="give site-2 a Dask cluster of N workers on this machine")
@click.option("--training", default=TRAINING, help="folder of the training whose model is used, in the workspace")
@click.option("--data", metavar="DIR", type=Path, help="write the sites' files below this folder")
@click.option("--write", is_flag=True, help="write every job folder anew")
@click.option("--model", default=made.SIMULATED, metavar="JOB_ID", help="the training that written job folders name")
def main(name: str | None, **given: Any) -> None:
    """Do what the command line asks for."""
    try:
        done = [*_write(given["model"])] if given["write"] else []
        if name is not None:
            table = _table(name, given)
            if given["data"] is not None:
                done.append(_written(name, given["data"], table))
            if given["workspace"] is not None:
                _run(name, given, table)
            elif given["data"] is None:
                raise ConfigurationError(f"say where to run {name}: --workspace DIR")
        elif not done:
            raise ConfigurationError("name a job, or give --write; --help says what else there is")
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None
    sys.stdout.write("".join(f"{line}\n" for line in done))


def _write(model: str) -> Iterable[str]:
    for name, example in EXAMPLES.items():
        changes = {"model": model} if example.data is _columns_of_training else {}
        yield f"wrote {write_folder(recipe(name, **changes), FOLDER)}"


def _table(name: str, given: Mapping[str, Any]) -> Table:
    file, data = given["file"], EXAMPLES[name].data
    is_vertical = name.startswith("vertical_") and data is _columns
    if not is_vertical and (given["label"] != made.LABEL or given["parties"] != len(made.SITES)):
        raise ConfigurationError("--label and --parties belong to vertical trainings")
    if file is None:
        return Table(None, given["label"], given["parties"])
    if data not in (_columns, _loans, _credit):
        raise ConfigurationError(f"--file: {name} has rows of its own")
    if not file.is_file():
        raise ConfigurationError(f"there is no file {file}")
    rows = pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_csv(file)
    return Table(rows, given["label"], given["parties"])


def _written(name: str, folder: Path, table: Table) -> str:
    policy = json.dumps(write_data(name, folder, table), indent=1)
    return f"the sites' files are in {folder}; each policy needs\n{policy}"


def _run(name: str, given: Mapping[str, Any], table: Table) -> None:
    job = recipe(name, label=table.label) if EXAMPLES[name].data is _columns and name != "alignment" else recipe(name)
    workspace = prepare(name, given["workspace"], table)
    if EXAMPLES[name].data is _columns_of_training:
        place_parts(given["workspace"] / given["training"], workspace / "local" / "inputs")
    if given["workers"] is not None:
        made.put_on_cluster(workspace, "site-2", given["workers"])
    job.execute(SimEnv(num_clients=table.n_sites, workspace_root=str(given["workspace"])))


if __name__ == "__main__":
    main()
