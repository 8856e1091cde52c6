"""The subcommands of ``veilboost`` for what follows a job: models in use, new rows, what a site can show of it."""

from __future__ import annotations

import argparse
from pathlib import Path

from nvflare_plugins.cli import descriptions
from nvflare_plugins.cli.later import Subparsers, add_command
from nvflare_plugins.data_sets.declaration import ENCODINGS


def add_compare(subparsers: Subparsers) -> None:
    """Add ``veilboost compare``."""
    parser = add_command(
        subparsers,
        "compare",
        "compare the model of a horizontal job with one of this site's own rows",
        descriptions.COMPARE,
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN_DIR", help="folder of a run at a site")
    parser.add_argument(
        "--workspace", metavar="DIR", type=Path, help="the site's workspace (default: where RUN_DIR lies)"
    )
    parser.add_argument(
        "--data-set", metavar="NAME", help="rows to compare on, a data set of the policy (default: the job's own)"
    )


def add_predict(subparsers: Subparsers) -> None:
    """Add ``veilboost predict``."""
    parser = add_command(subparsers, "predict", "score a file with a finished model", descriptions.PREDICT)
    parser.add_argument(
        "model",
        type=Path,
        help="model.json of a run, merged_model.json, or the name of a model (veilboost models), NAME or NAME@VERSION",
    )
    parser.add_argument("data", type=Path, help="rows to score: CSV (also .csv.gz) or Parquet, also a folder of files")
    parser.add_argument("--out", type=Path, required=True, help="file to write: .csv or .parquet")
    parser.add_argument("--explain", action="store_true", help="SHAP values too, and a picture beside the file (.svg)")
    parser.add_argument(
        "--threshold", type=float, help="probability above which a row is of the second of two classes (default: 0.5)"
    )
    parser.add_argument("--id", metavar="COLUMN", help="column that names the rows, kept in the file that is written")
    parser.add_argument("--ignore", metavar="COLUMN", action="append", default=[], help="column that is no feature")
    parser.add_argument("--unknown-is-missing", action="store_true", help="categories in no list count as missing")
    parser.add_argument(
        "--rounds", choices=["all", "best"], default="all", help="best: up to the best round of early stopping"
    )
    reading = parser.add_argument_group("how the file is read")
    reading.add_argument("--missing", metavar="TEXT", action="append", default=[], help="one more text for missing")
    reading.add_argument("--separator", help="between the columns of a CSV file (default: a comma)")
    reading.add_argument("--encoding", choices=ENCODINGS, help="of a CSV file (default: utf-8)")
    reading.add_argument(
        "--workspace", metavar="DIR", type=Path, help="read it as a data set of the site in this workspace is read"
    )
    reading.add_argument("--site", metavar="NAME", help="the site's name; with a workspace")
    reading.add_argument("--data-set", metavar="NAME", help="the data set of the site's policy; with a workspace")


def add_export(subparsers: Subparsers) -> None:
    """Add ``veilboost export``."""
    parser = add_command(
        subparsers, "export", "write a copy of a model that may leave the site: XGBoost's JSON, ONNX, or treelite"
    )
    parser.add_argument("model", type=Path, help="model.json of a run")
    parser.add_argument(
        "output", type=Path, help="file to write: .onnx, .treelite, or any other name for XGBoost's own JSON"
    )


def add_models(subparsers: Subparsers) -> None:
    """Add ``veilboost models``."""
    parser = add_command(
        subparsers,
        "models",
        "list the models that a site has from its jobs, name them, go back to an earlier version",
        descriptions.MODELS,
    )
    parser.add_argument("action", nargs="?", choices=("list", "add", "rollback"), default="list")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="add: NAME JOB_ID; rollback: NAME VERSION")
    _add_site(parser)


def add_drift(subparsers: Subparsers) -> None:
    """Add ``veilboost drift``."""
    parser = add_command(
        subparsers, "drift", "compare a file of new rows with those that a model was trained on", descriptions.DRIFT
    )
    parser.add_argument("model", metavar="NAME", help="name of a model (veilboost models), NAME@VERSION, or a job's id")
    parser.add_argument("data", type=Path, metavar="NEW_FILE", help="the new rows, written as the training file is")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write a page, and FILE.json beside it")
    parser.add_argument(
        "--threshold", type=float, default=0.25, help="stability index from which it is drift (default: 0.25)"
    )
    parser.add_argument(
        "--training", type=Path, metavar="FILE", help="the training rows (default: the data set as it is now)"
    )
    parser.add_argument("--ignore", metavar="COLUMN", action="append", default=[], help="column that is no feature")
    _add_site(parser)


def add_snapshot(subparsers: Subparsers) -> None:
    """Add ``veilboost snapshot``."""
    parser = add_command(
        subparsers,
        "snapshot",
        "write the rows of a query to a database into a dated file that jobs read; without a name, list them",
        descriptions.SNAPSHOT,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a snapshot of the site's policy")
    parser.add_argument("--keep", type=int, metavar="N", help="remove all but the N newest afterwards")
    _add_site(parser)


def add_score(subparsers: Subparsers) -> None:
    """Add ``veilboost score``."""
    parser = add_command(
        subparsers, "score", "ask a job that stays (action serve) for scores of rows", descriptions.SCORE
    )
    parser.add_argument("job", metavar="JOB_ID", help="the job that stays")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="positions in the alignment; none reads standard input")
    parser.add_argument("--ids", action="store_true", help="the rows are ids of this site")
    parser.add_argument("--status", action="store_true", help="say what was answered so far, and how fast")
    parser.add_argument("--refresh", metavar="JOB_ID", help="take the rows of that alignment, at all parties")
    parser.add_argument("--stop", action="store_true", help="end the job at all parties")
    parser.add_argument("--workspace", metavar="DIR", type=Path, help="the site's workspace")
    parser.add_argument("--site", metavar="NAME", help="the site's name")
    parser.add_argument("--socket", metavar="PATH", help="the job's socket, in place of --workspace and --site")


def add_dossier(subparsers: Subparsers) -> None:
    """Add ``veilboost dossier``."""
    parser = add_command(
        subparsers, "dossier", "put all that this site can show of a job into one signed archive", descriptions.DOSSIER
    )
    parser.add_argument("job", metavar="JOB", help="folder of a run at a site, or a job's id (with a workspace)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.zip", help="archive to write")
    parser.add_argument("--workspace", metavar="DIR", type=Path, help="the site's workspace (default: where JOB lies)")
    parser.add_argument("--site", metavar="NAME", help="the site's name; with a job's id")
    parser.add_argument(
        "--evidence",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="exported evidence of all parties, which is verified and goes into the archive",
    )
    parser.add_argument(
        "--root-ca", type=Path, metavar="FILE", help="with --evidence: the rootCA.pem of your own startup kit"
    )
    parser.add_argument(
        "--held-out",
        metavar="NAME",
        help="data set of the policy with rows that the model was not trained on (default: the job's evaluation set)",
    )
    parser.add_argument("--no-attacks", action="store_true", help="run no attacks, which the archive then says")


def _add_site(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workspace", metavar="DIR", type=Path, required=True, help="the site's workspace")
    parser.add_argument("--site", metavar="NAME", required=True, help="the site's name")
