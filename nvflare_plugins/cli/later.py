"""Subcommands whose modules are imported once they are called for."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module


def later(module: str) -> Callable[[argparse.Namespace], int]:
    """Return what imports a module's ``run`` and calls it."""

    def run(options: argparse.Namespace) -> int:
        code: int = import_module(f"nvflare_plugins.cli.{module}").run(options)
        return code

    return run
