"""Data for trying out the job folders of this project, and policies under which all of them run.

Everything is scikit-learn's breast cancer set or invented; nothing here is anybody's. The policies consent to whatever
any example asks for, which no real site should do: ``veilboost site-setup DIR --example`` writes them only where no
policy speaks of other data.
"""

from __future__ import annotations

import atexit
import json
import logging
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import make_folder, write_atomically, write_private_table
from nvflare_plugins.site.flare_boundary import Role
from nvflare_plugins.site.policy_values import FOLDERS, POLICY_FILE
from nvflare_plugins.site.profiles import PROFILES
from nvflare_plugins.site.runtimes import Runtime, runtime_of, site_name
from nvflare_plugins.site.setup import SetupOptions, check_place, set_up, workspaces

if TYPE_CHECKING:
    import pandas as pd


# Data for trying out vertical jobs: one table dealt out by columns, with the disorder that real parties have.
#
# Every party has some rows that others lack, its own order of rows, and its own way of writing the same ids.

ID = "id"
LABEL = "target"
DATA_SETS = ("breast_columns", "breast_columns_test")
"""Names of the training and the test set in the vertical examples; horizontal ones have the same rows otherwise."""


def breast_cancer() -> pd.DataFrame:
    """Return scikit-learn's breast cancer set: 569 rows, 30 features and ``target``."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer(as_frame=True).frame
    table.columns = [name.replace(" ", "_") for name in table.columns]
    return table


def deal_columns(table: pd.DataFrame, label: str, folders: Sequence[Path]) -> None:
    """Give each party its columns of ``DATA_SETS``; the first party has the label, and each lacks a tenth of the rows.

    Args:
        folders: one for each party, made if they do not exist.
    """
    random = np.random.default_rng(0)  # nothing here is secret
    features = [name for name in table.columns if name != label]
    ids = np.array([f"P-{number:06d}" for number in random.choice(10**6, len(table), replace=False)])
    n_test = int(0.3 * len(table))
    for party, columns in enumerate(np.array_split(features, len(folders))):
        own = table[[*columns, *([label] if party == 0 else [])]]
        own.insert(0, ID, [_spelled(name, party) for name in ids])
        make_folder(folders[party])
        for name, rows in zip(DATA_SETS, (np.arange(n_test, len(table)), np.arange(n_test)), strict=True):
            kept = random.permutation(rows)[: len(rows) - int(0.1 * len(rows))]
            write_private_table(folders[party] / f"{name}.csv", own.iloc[kept])


def _spelled(name: str, party: int) -> str:
    """Write an id as this party's files do: alignment must not depend on white space."""
    return (name, f" {name}", f"{name}\t ")[party % 3]


SITES = ("site-1", "site-2", "site-3")
SIMULATED = "simulate_job"  # what FLARE's simulator calls every job
_N_TEST = 150

PATIENTS = "patients"
SEARCHES, SEARCHES_TEST = "searches", "searches_test"
STAYS, STAYS_TEST = "stays", "stays_test"
PATIENT_BOUNDS = {
    "mean_radius": (5, 30),
    "mean_texture": (5, 40),
    "mean_area": (100, 2600),
    "mean_smoothness": (0, 0.2),
    "mean_compactness": (0, 0.4),
    "mean_concavity": (0, 0.5),
    "worst_radius": (5, 40),
    "worst_area": (100, 4500),
}
PARTS, PARTS_TEST = "breast_parts", "breast_parts_test"
CREDIT = "credit2"
LOAN_COLUMNS = "loan_columns"
LOANS = "loans"  # rows of the same kind, without a privacy budget
_MONTHS = range(1, 7)
CREDIT_BOUNDS = {
    "LIMIT_BAL": [0, 1_000_000],
    "SEX": [1, 2],
    "EDUCATION": [0, 6],
    "MARRIAGE": [0, 3],
    "AGE": [18, 100],
    **{f"PAY_{n}": [-2, 9] for n in (0, 2, 3, 4, 5, 6)},
    **{f"BILL_AMT{n}": [-100_000, 1_000_000] for n in _MONTHS},
    **{f"PAY_AMT{n}": [0, 1_000_000] for n in _MONTHS},
}
"""Round numbers after the public description of the set; private jobs must take their bounds from such knowledge."""
_BUDGET = {"epsilon": 5.0, "delta": 1e-5}
_PURE_BUDGET = {"epsilon": 5.0, "delta": 1e-6, "pure_epsilon": 4.5}


def write_breast_cancer(folders: Sequence[Path]) -> None:
    """Write each site its third of scikit-learn's breast cancer set: 70 % to train with, 30 % to test with."""
    table = breast_cancer().sample(frac=1.0, random_state=0)
    for rank, folder in enumerate(folders):
        make_folder(folder)
        part = table.iloc[rank :: len(folders)]
        n_train = int(0.7 * len(part))
        write_private_table(folder / "breast_train.csv", part.iloc[:n_train])
        write_private_table(folder / "breast_test.csv", part.iloc[n_train:])


def deal_rows(frame: pd.DataFrame, folders: Sequence[Path], name: str) -> None:
    """Deal all rows out to sites, as a data set of this name."""
    shares = np.array_split(np.random.default_rng(0).permutation(len(frame)), len(folders))
    for folder, rows in zip(folders, shares, strict=True):
        write_private_table(make_folder(folder) / f"{name}.csv", frame.iloc[rows])


def write_patients(folders: Sequence[Path]) -> None:
    """Deal rows of breast cancer with few features and an id out to sites."""
    frame = breast_cancer()
    frame = frame[[*PATIENT_BOUNDS, LABEL]].assign(patient=[f"P{i:04d}" for i in range(len(frame))])
    deal_rows(frame, folders, PATIENTS)


def write_parts(folders: Sequence[Path]) -> None:
    """Write each party's columns of the same rows, and what is public about the passive parties' features.

    The bounds stand for public knowledge: round numbers that hold every possible measurement.
    """
    frame = breast_cancer()
    frame.insert(0, "patient", [f"B{i:04d}" for i in range(len(frame))])
    features = [name for name in frame.columns if name not in ("patient", LABEL)]
    shuffled = frame.sample(frac=1, random_state=0)
    for party, (folder, names) in enumerate(zip(folders, np.array_split(features, len(folders)), strict=True)):
        make_folder(folder)
        columns = ["patient", *names, *([LABEL] if party == 0 else [])]
        write_private_table(folder / f"{PARTS}.csv", shuffled[columns].iloc[_N_TEST:])
        write_private_table(folder / f"{PARTS_TEST}.csv", shuffled[["patient", *names]].iloc[:_N_TEST])
        if party > 0:
            public = {name: {"low": 0, "high": float(f"{frame[name].max():.0e}")} for name in names}
            (folder / "bucket_features.json").write_text(json.dumps(public, indent=1))


def invented_credit(n_rows: int = 30_000) -> pd.DataFrame:
    """Return rows with the columns of the credit set: uniform within their bounds; two columns tell the label."""
    import pandas as pd

    random = np.random.default_rng(1)
    frame = pd.DataFrame({name: random.integers(low, high + 1, n_rows) for name, (low, high) in CREDIT_BOUNDS.items()})
    risk = frame.PAY_0 - frame.LIMIT_BAL / 250_000 + random.normal(size=n_rows)
    return frame.assign(label=(risk > 4).astype(int))


def write_credit(frame: pd.DataFrame, folders: Sequence[Path], name: str = CREDIT) -> None:
    """Deal rows of the credit set out to sites, as a data set of this name."""
    shuffled = frame.sample(frac=1, random_state=0)
    for folder, rows in zip(folders, np.array_split(np.arange(len(frame)), len(folders)), strict=True):
        make_folder(folder)
        write_private_table(folder / f"{name}.parquet", shuffled.iloc[rows])


def write_stays(folders: Sequence[Path]) -> None:
    """Write invented patients, for training and for evaluation: days until readmission, or until the last look."""
    import pandas as pd

    for number, folder in enumerate(folders):
        make_folder(folder)
        for name, n_rows in ((STAYS, 500), (STAYS_TEST, 200)):
            random = np.random.default_rng([number, n_rows])
            age, ward = random.normal(66, 12, n_rows).round(1), random.integers(0, 3, n_rows)
            creatinine = random.gamma(4.0, 0.3, n_rows).round(2)
            mean = 6 - (age - 66) / 30 - (creatinine - 1) * (1 + ward / 2)
            until = np.exp(mean + 0.8 * np.log(random.exponential(size=n_rows)))
            last_look = random.uniform(30, 365, n_rows)
            columns = {"age": age, "ward": ward, "creatinine": creatinine}
            days = np.maximum(np.ceil(np.minimum(until, last_look)), 1).astype(int)
            rows = pd.DataFrame(columns).assign(days=days, readmitted=(until <= last_look).astype(int))
            write_private_table(folder / f"{name}.parquet", rows)


def write_searches(folders: Sequence[Path]) -> None:
    """Write invented searches in shops, for training and for evaluation: each shop numbers its own."""
    import pandas as pd

    for number, folder in enumerate(folders):
        make_folder(folder)
        for name, n_searches in ((SEARCHES, 150), (SEARCHES_TEST, 50)):
            random = np.random.default_rng([number, n_searches])
            search = np.repeat(np.arange(n_searches), random.integers(5, 25, n_searches))
            match, stars = random.random(search.size).round(3), random.integers(1, 6, search.size)
            price, days = random.gamma(2.0, 20.0, search.size).round(2), random.integers(0, 400, search.size)
            taste = 3 * match + stars / 2 - price / 60 + random.normal(size=search.size)
            found = {"search": search, "match": match, "stars": stars, "price": price, "days": days}
            rows = pd.DataFrame(found).assign(relevance=np.clip(np.floor(taste), 0, 4).astype(int))
            write_private_table(folder / f"{name}.parquet", rows)


def write_loan_columns(folders: Sequence[Path]) -> None:
    """Deal columns of invented rows out to parties, in another order at each; the first has the label."""
    frame = invented_credit(3_600)
    features = np.array_split([name for name in frame.columns if name != "label"], len(folders))
    frame.insert(0, "loan", [f"L{number:05d}" for number in range(len(frame))])
    for number, (folder, names) in enumerate(zip(folders, features, strict=True)):
        make_folder(folder)
        columns = ["loan", *names, *(["label"] if number == 0 else [])]
        write_private_table(folder / f"{LOAN_COLUMNS}.parquet", frame[columns].sample(frac=1, random_state=number))


def write_all(folder: Path) -> None:
    """Write what every example reads, below ``folder``/SITE."""
    folders = [folder / site for site in SITES]
    deal_columns(breast_cancer(), LABEL, folders)
    for name in (CREDIT, LOANS):
        write_credit(invented_credit(6_000), folders, name)
    for write in (write_breast_cancer, write_patients, write_parts, write_loan_columns, write_searches, write_stays):
        write(folders)


def data_sets(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the policies say of each data set, where it lies below ``folder``/SITE."""

    def of(file: str, **more: object) -> dict[str, Any]:
        return {"path": str(folder.absolute() / "{site}" / file), **more}

    return {
        "breast": of("breast_train.csv"),
        "breast_test": of("breast_test.csv"),
        **{name: of(f"{name}.csv", id=ID) for name in DATA_SETS},
        PATIENTS: of(f"{PATIENTS}.csv", id="patient", privacy=_PURE_BUDGET),
        PARTS: of(f"{PARTS}.csv", id="patient", privacy=_PURE_BUDGET),
        PARTS_TEST: of(f"{PARTS_TEST}.csv", id="patient"),
        CREDIT: of(f"{CREDIT}.parquet", privacy={**_BUDGET, "own_persons": True}),
        LOANS: of(f"{LOANS}.parquet"),
        **{name: of(f"{name}.parquet") for name in (SEARCHES, SEARCHES_TEST, STAYS, STAYS_TEST)},
        LOAN_COLUMNS: of(f"{LOAN_COLUMNS}.parquet", id="loan"),
    }


def policy(folder: Path) -> dict[str, Any]:
    """Return what the policies say where ``write_all`` has written the data below ``folder``."""
    consents = ("plain_profile", "exact_bins", "merge_model", "explain", "share_own_trees", "feature_profile")
    return {
        "data_sets": data_sets(folder),
        "allowed_profiles": list(PROFILES),
        # The last is for the active party of FederBoost alone, whose labels nothing protects.
        "consents": {**dict.fromkeys((*consents, "exact_use_of_budgeted_data"), True), "tuning": 10_000},
        "inputs": str(folder / "{site}"),
    }


def prepare(folder: Path) -> list[str]:
    """Write the examples' data beside a workspace, and policies under which each job folder runs there as it stands.

    Args:
        folder: a simulator or POC workspace, or a site's kit, of sites that are called site-1, site-2 and site-3.

    Returns:
        What was changed, one sentence each.

    Raises:
        ConfigurationError: a policy speaks of other data, or a site has another name; nothing was written.
    """
    check_place(folder)
    found = workspaces(folder)
    is_simulator = found[0][1] is Role.SIMULATOR
    for path, role in found:
        if role is not Role.SERVER:
            _check_is_free(path, role)
    # FLARE empties a simulator's workspace but for its folder local.
    inside = folder / "local" if is_simulator else (folder.parent if found[0][0] == folder else folder)
    data = inside.absolute() / "example_data"
    write_all(data)
    changes = [f"{data}: data of {', '.join(SITES)}", *set_up(folder)]
    if is_simulator:
        changes += keep_simulated_model(folder, data)
    set_up(folder, SetupOptions(policy=policy(data)))
    policies = [path / POLICY_FILE for path, role in found if role is not Role.SERVER]
    text = "consents to all that the examples ask for; never use it for data of anybody's"
    return [*changes, *(f"{file}: {text}" for file in policies)]


def keep_simulated_model(workspace: Path, inputs: Path) -> list[str]:
    """Copy each site's part of the vertical model that was trained last in a simulator to its inputs.

    The simulator empties the sites' folders before the next job, which may be one that predicts with that model.

    Returns:
        One sentence, if there was a model.
    """
    from nvflare_plugins.kinds.vertical.model import ACTIVE_FILE, PASSIVE_FILE

    parts = [workspace / site / FOLDERS["runs"] / SIMULATED / ACTIVE_FILE for site in SITES]
    parts = [path if path.is_file() else path.with_name(PASSIVE_FILE) for path in parts]
    if not all(path.is_file() for path in parts):
        return []
    for site, path in zip(SITES, parts, strict=True):
        shutil.copy(path, inputs / site / f"{SIMULATED}.{site}.json")
    return [f"{inputs}: the vertical model that was trained here last, for jobs/vertical_predict and its like"]


def _check_is_free(workspace: Path, role: Role) -> None:
    if role is Role.SITE and site_name(workspace) not in SITES:
        raise ConfigurationError(
            f"--example has data for {', '.join(SITES)}, and {workspace} is {site_name(workspace)}"
        )
    if runtime_of(workspace) is not Runtime.PROCESS:
        raise ConfigurationError(f"--example cannot mount data into containers: {workspace} runs its jobs there")
    file = workspace / POLICY_FILE
    if file.is_file():
        others = set(json.loads(file.read_text(encoding="utf-8")).get("data_sets", {})) - set(data_sets(Path()))
        if others:
            raise ConfigurationError(
                f"{file} speaks of data set {min(others)!r}, and an example's policy would consent to far too much for "
                "it. Remedy: use an empty workspace for --example."
            )


def put_on_cluster(workspace: Path, site: str, n_workers: int) -> None:
    """Start a Dask cluster on this machine's loopback until this process ends, and name it in one site's policy.

    The policy is then what it was before: the next run would wait for a scheduler that has gone.

    Raises:
        ConfigurationError: Dask is not installed, or the workspace has no policy.
    """
    if n_workers < 1:
        raise ConfigurationError("--workers must be at least 1")
    path = workspace / POLICY_FILE
    if not path.is_file():
        raise ConfigurationError(f"{workspace} has no policy: run `veilboost site-setup` on it first")
    before, mode = path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
    try:
        import dask
        from distributed import LocalCluster
    except ImportError:
        raise ConfigurationError("--workers needs Dask: pip install 'veilboost[cluster]'") from None
    # What jobs/CLUSTER.md asks of every worker: one thread, and nothing that Dask writes to a disk.
    dask.config.set({"distributed.worker.memory.target": False, "distributed.worker.memory.spill": False})
    cluster = LocalCluster(
        n_workers=n_workers,
        threads_per_worker=1,
        protocol="tcp",
        host="127.0.0.1",
        dashboard_address=None,
        silence_logs=logging.CRITICAL,  # of workers that end with this process
    )
    atexit.register(cluster.close)
    atexit.register(write_atomically, path, before, mode)
    # The simulator gives all sites one policy.
    named = {"scheduler": cluster.scheduler_address, "workers": n_workers, "sites": [site]}
    policy = {**json.loads(before), "cluster": named}
    write_atomically(path, json.dumps(policy, indent=2).encode(), 0o600)
    sys.stdout.write(f"{site} has {n_workers} workers behind {cluster.scheduler_address}\n")
