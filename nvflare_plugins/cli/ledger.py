"""``veilboost ledger``: what a site has spent of its privacy budgets, over all jobs."""

from __future__ import annotations

import argparse
from pathlib import Path

from dp_components.ledger import Ledger, ledger_files
from he_processors.errors import ConfigurationError
from nvflare_plugins.site.policy.policy import SitePolicy, own_workspace


def ledger_folder(policy: SitePolicy) -> Path:
    """Return where a site keeps the privacy ledgers of its data sets."""
    return policy.ledgers


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("ledger", help="show what a site has spent of its privacy budgets")
    parser.add_argument(
        "workspace", type=Path, help="the site's workspace, or the folder in which it lies under the site's name"
    )
    parser.add_argument("--site", required=True, help="the site's name")
    parser.add_argument("--data-set", help="only this data set")
    parser.add_argument(
        "--close", metavar="JOB", help="end a job that will not go on, so that what it has not used is free again"
    )
    parser.add_argument(
        "--accept-cut",
        action="store_true",
        help="go on with a ledger whose last records, or whose head, are lost and cannot be restored: all that may be "
        "missing is charged, the whole budget where the head is lost too",
    )
    parser.set_defaults(func=_run)


def _run(options: argparse.Namespace) -> int:
    policy = SitePolicy.load(own_workspace(options.workspace, options.site), options.site)
    folder, heads = ledger_folder(policy), policy.ledger_heads
    files = [path for path in ledger_files(folder) if options.data_set in (None, path.stem)]
    if options.data_set is not None and not files:
        raise ConfigurationError(f"{options.site} has no privacy ledger for data set {options.data_set!r}.")
    if (options.close is not None or options.accept_cut) and len(files) != 1:
        raise ConfigurationError("name the data set whose ledger is meant, with --data-set.")
    if options.accept_cut:
        charged = Ledger(files[0], heads).accept_cut()
        parts = zip(("mu^2", "pure epsilon", "rho", "slack"), charged.parts(), strict=True)
        print(f"Charged for what may be missing: {', '.join(f'{name} {part:.6g}' for name, part in parts)}.")
    if options.close is not None:
        Ledger(files[0], heads).close_job(options.close)
    if not files:
        print(f"{options.site} has spent nothing: there is no privacy ledger in {folder}.")
        return 0
    print("\n\n".join(Ledger(path, heads).describe() for path in files))
    return 0
