"""The command ``veilboost``: one subcommand per module, each with its own ``add_parser``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from dp_components.errors import PrivacyError
from he_processors.errors import VeilBoostError
from nvflare_plugins.formatting import printable

_SUBCOMMANDS = (
    "nvflare_plugins.cli.demo",
    "nvflare_plugins.site.setup",
    "nvflare_plugins.cli.plan.command",
    "nvflare_plugins.cli.verify",
    "nvflare_plugins.report.report",
    "nvflare_plugins.cli.export",
    "nvflare_plugins.cli.registry",
    "nvflare_plugins.cli.ledger",
)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command and of all its subcommands."""
    parser = argparse.ArgumentParser(
        prog="veilboost", description="Private federated XGBoost for NVIDIA FLARE, on the stock XGBoost wheel."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module in _SUBCOMMANDS:
        import_module(module).add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code: 0 well, 1 refused or failed, 2 wrong usage; ``verify`` has more."""
    options = make_parser().parse_args(arguments)
    try:
        return options.func(options) or 0
    except (VeilBoostError, PrivacyError) as error:
        lines = (printable(line, 2000) for line in str(error).splitlines())  # it may quote a peer or a job
        print(f"veilboost {options.command}: " + "\n".join(lines), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
