"""Commands before a training: try one out on this machine, and plan what one will take."""

from __future__ import annotations

from pathlib import Path

import click

from nvflare_plugins.cli.options import FILE_OPTIONS, PATH, Options, SeveralValues, argument, command, option
from nvflare_plugins.cli.sites import budget
from nvflare_plugins.site.profiles import Family, profiles_of

CUT_MODES = ("quantile", "exact", "uniform", "logarithmic")  # importing what they come from takes long


@command(
    "run the main job on one machine beside centralized XGBoost",
    option("--data", metavar="FILE", type=PATH, help="CSV or Parquet file; default: scikit-learn's breast cancer set"),
    option("--label", metavar="COLUMN", help="label column of the file"),
    *FILE_OPTIONS,
    option("--profile", type=click.Choice(profiles_of(Family.HORIZONTAL)), default="masks"),
    option("--rounds", type=int, default=10),
    option("--runs", metavar="DIR", type=PATH, default=Path("runs"), help="folder for the demo's runs (default: runs)"),
)
def demo(options: Options) -> int:
    """``veilboost demo``: the main job from data to report on one machine, beside centralized XGBoost."""
    from nvflare_plugins.cli.demo import run

    return run(options)


_SHAPE_OPTIONS = (
    option(
        "--rows", type=int, help="training rows of all sites together; for private jobs only if that number is public"
    ),
    option(
        "--features",
        type=int,
        help="columns; in vertical training the active party's, in a FederBoost job a passive party's",
    ),
    SeveralValues(
        ["--foreign-features"],
        type=int,
        help="vertical training: columns of each passive party, in order of their names",
    ),
    option(
        "--workers",
        type=int,
        metavar="N",
        help="vertical training: also with 1, 2, 4, ... up to N workers at each party (jobs/CLUSTER.md)",
    ),
    option("--key-bits", type=int, help="vertical training: key length (default 3072, or the job's)"),
    option("--sites", type=int, default=3),
    option("--bins", type=int, help="default 256, or the job's"),
    option("--depth", type=int, help="default 6, or the job's"),
    option("--rounds", type=int, help="default 10, or the job's"),
    option("--outputs", type=int, help="classes of a multiclass objective"),
    option("--max-leaves", type=int, help="leaves per tree, for lossguide"),
    option("--metrics", type=int, help="evaluation metrics times evaluation sets (default 1)"),
    option("--cuts", type=click.Choice(CUT_MODES)),
    option("--missing", is_flag=True, help="every feature has missing values somewhere"),
    option(
        "--profile",
        type=click.Choice(["all", *profiles_of(Family.HORIZONTAL), *profiles_of(Family.VERTICAL)]),
        default="all",
        help="horizontal training: one, or all beside each other; vertical: paillier (or the job's) or elgamal",
    ),
)
"""How large a training is, and under which profile."""

_PRIVATE_OPTIONS = (
    option(
        "--budget",
        type=budget,
        metavar="EPSILON,DELTA[,pure_epsilon=EPSILON][,rows_per_person=ROWS]",
        help="private jobs: how many more trainings a whole budget bears, as site-setup takes it",
    ),
    option(
        "--workspace",
        metavar="DIR",
        type=PATH,
        help="private jobs: how many more trainings what is left of a site's budget bears; the site's workspace",
    ),
    option("--site", metavar="NAME", help="the site's name; with a workspace"),
    option(
        "--base-rate",
        type=float,
        metavar="P",
        help="private trees: share of one of the two classes, where it is public (default 0.5)",
    ),
)
"""What a plan of a private job is asked beside its shape."""


@command(
    "estimate time, bytes, memory and leakage before a run",
    argument("job", metavar="[JOB_FOLDER]", required=False, type=PATH, help="take the training's shape from this job"),
    *_SHAPE_OPTIONS,
    option("--latency-ms", type=float, default=10.0, help="one empty rendezvous of all sites (default 10)"),
    option("--bandwidth-mbit", type=float, default=100.0, help="link of each site (default 100)"),
    option("--server-bandwidth-mbit", type=float, help="link of the server (default: as a site's)"),
    *_PRIVATE_OPTIONS,
    prints_json=True,
)
def plan(options: Options) -> int:
    """``veilboost plan``: what a training will take, before it runs.

    It estimates a training from its shape, or from a job folder plus rows and features. With --foreign-features it is a
    vertical training. For a private job it says what is spent, how much noise that means and what one person is
    promised.
    """
    from nvflare_plugins.cli.plan import run

    return run(options)
