"""``veilboost ledger``: what a site has spent of its privacy budgets, over all jobs."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from dp_components.ledger import Ledger, ledger_files
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.cli.outputs import check_output
from nvflare_plugins.pages.ledger_page import build_page
from nvflare_plugins.site.policy import SitePolicy, own_workspace


def run(options: argparse.Namespace) -> int:
    """Show the ledgers, after the changes asked for."""
    if options.html is not None:
        check_output("--html", options.html, ".html")
    policy = SitePolicy.load(own_workspace(options.workspace, options.site), options.site)
    folder, heads = policy.ledgers, policy.ledger_heads
    files = [path for path in ledger_files(folder) if options.data_set in (None, path.stem)]
    if not files:
        which = "" if options.data_set is None else f" for data set {options.data_set!r}"
        raise ConfigurationError(
            f"{options.site} has spent nothing: there is no privacy ledger{which} in {folder}; or its workspace or "
            "name is another."
        )
    if (options.close is not None or options.accept_cut) and len(files) != 1:
        raise ConfigurationError("name the data set whose ledger is meant, with --data-set.")
    if options.accept_cut:
        charged = Ledger(files[0], heads).accept_cut()
        parts = zip(("mu^2", "pure epsilon", "rho", "slack"), charged.parts(), strict=True)
        print(f"Charged for what may be missing: {', '.join(f'{name} {part:.6g}' for name, part in parts)}.")
    if options.close is not None:
        Ledger(files[0], heads).close_job(options.close)
    if options.html is not None:
        histories = [Ledger(path, heads).history() for path in files]
        html = build_page(histories, policy.site, datetime.now(UTC))
        print(write_atomically(options.html, html.encode(), 0o600))
        return 0
    print("\n\n".join(Ledger(path, heads).describe() for path in files))
    return 0
