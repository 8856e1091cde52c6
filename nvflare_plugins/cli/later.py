"""Subcommands whose modules are imported once they are called for."""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module
from typing import TypeAlias

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    subparsers: Subparsers, name: str, words: str, description: str | None = None, *, module: str = ""
) -> argparse.ArgumentParser:
    """Add a subcommand, and return its parser.

    Args:
        words: for the list of subcommands.
        description: printed as it stands.
        module: whose ``run`` it calls, below ``nvflare_plugins.cli``; the subcommand's own name where none is given.
    """
    parser = subparsers.add_parser(name, help=words, description=description)
    if description is not None:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(func=partial(_run, module or name.replace("-", "_")))
    return parser


def _run(module: str, options: argparse.Namespace) -> int:
    code: int = import_module(f"nvflare_plugins.cli.{module}").run(options)
    return code
