"""``veilboost registry``: what a site remembers of earlier releases."""

from __future__ import annotations

import argparse
from pathlib import Path

from nvflare_plugins.registry import Registry
from nvflare_plugins.site_policy import SitePolicy, own_workspace


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("registry", help="list the runs and searches that a site remembers")
    parser.add_argument(
        "workspace", type=Path, help="the site's workspace, or the folder in which it lies under the site's name"
    )
    parser.add_argument("--site", required=True, help="the site's name")
    parser.set_defaults(func=_run)


def _run(options: argparse.Namespace) -> int:
    workspace = own_workspace(options.workspace, options.site)
    print(Registry.open(SitePolicy.load(workspace, options.site)).describe())
    return 0
