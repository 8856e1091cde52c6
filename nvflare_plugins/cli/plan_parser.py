"""The arguments of ``veilboost plan``; as parsers.py, without what takes seconds to import."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from nvflare_plugins.cli.later import Subparsers, add_command

HORIZONTAL_PROFILES = ("plain", "masks", "bfv", "ckks")
VERTICAL_PROFILES = ("paillier", "elgamal")  # that can be planned
CUT_MODES = ("quantile", "exact", "uniform", "logarithmic")


def add_plan(subparsers: Subparsers, bare_budget: Callable[[str], dict[str, float]]) -> None:
    """Add the subcommand. Args: bare_budget: reads the text of a budget."""
    parser = add_command(
        subparsers, "plan", "estimate time, bytes, memory and leakage before a run", module="plan.command"
    )
    parser.description = (
        "Estimate a training from its shape, or from a job folder plus rows and features. With "
        "--foreign-features it is a vertical training. For a private job it says what is spent, how much noise that "
        "means and what one person is promised."
    )
    parser.add_argument(
        "job", nargs="?", type=Path, metavar="JOB_FOLDER", help="take the training's shape from this job"
    )
    _shape_options(parser)
    parser.add_argument("--latency-ms", type=float, default=10.0, help="one empty rendezvous of all sites (default 10)")
    parser.add_argument("--bandwidth-mbit", type=float, default=100.0, help="link of each site (default 100)")
    parser.add_argument("--server-bandwidth-mbit", type=float, help="link of the server (default: as a site's)")
    _private_options(parser, bare_budget)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _shape_options(parser: argparse.ArgumentParser) -> None:
    """Add what says how large a training is, and under which profile."""
    parser.add_argument(
        "--rows", type=int, help="training rows of all sites together; for private jobs only if that number is public"
    )
    parser.add_argument(
        "--features",
        type=int,
        help="columns; in vertical training the active party's, in a FederBoost job a passive party's",
    )
    parser.add_argument(
        "--foreign-features",
        type=int,
        nargs="+",
        help="vertical training: columns of each passive party, in order of their names",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="vertical training: also with 1, 2, 4, ... up to N workers at each party (jobs/CLUSTER.md)",
    )
    parser.add_argument("--key-bits", type=int, help="vertical training: key length (default 3072, or the job's)")
    parser.add_argument("--sites", type=int, default=3)
    for name, default in (("bins", 256), ("depth", 6), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=None, help=f"default {default}, or the job's")
    parser.add_argument("--outputs", type=int, default=None, help="classes of a multiclass objective")
    parser.add_argument("--max-leaves", type=int, default=None, help="leaves per tree, for lossguide")
    parser.add_argument(
        "--metrics", type=int, default=None, help="evaluation metrics times evaluation sets (default 1)"
    )
    parser.add_argument("--cuts", choices=CUT_MODES, default=None)
    parser.add_argument("--missing", action="store_true", help="every feature has missing values somewhere")
    parser.add_argument(
        "--profile",
        choices=["all", *HORIZONTAL_PROFILES, *VERTICAL_PROFILES],
        default="all",
        help="horizontal training: one, or all beside each other; vertical: paillier (or the job's) or elgamal",
    )


def _private_options(parser: argparse.ArgumentParser, bare_budget: Callable[[str], dict[str, float]]) -> None:
    """Add what a plan of a private job is asked beside its shape."""
    budget = parser.add_argument_group("private jobs: how many more trainings a budget bears")
    budget.add_argument(
        "--budget",
        type=bare_budget,
        metavar="EPSILON,DELTA[,pure_epsilon=EPSILON][,rows_per_person=ROWS]",
        help="of a whole budget, as site-setup takes it",
    )
    budget.add_argument(
        "--workspace", type=Path, metavar="DIR", help="of what is left of a site's budget: its workspace"
    )
    budget.add_argument("--site", metavar="NAME", help="the site's name; with a workspace")
    parser.add_argument(
        "--base-rate",
        type=float,
        metavar="P",
        help="private trees: share of one of the two classes, where it is public (default 0.5)",
    )
