"""``veilboost report``: rebuild the report of a run."""

from __future__ import annotations

import argparse
import sys

from he_processors.errors import ConfigurationError
from nvflare_plugins.formatting import printable
from nvflare_plugins.report.report import write_report


def run(arguments: argparse.Namespace) -> int:
    """Write it, and say where."""
    try:
        print(write_report(arguments.run_folder, arguments.output))
    except (OSError, ConfigurationError) as error:
        print(f"veilboost report: {printable(str(error), 2000)}", file=sys.stderr)
        return 1
    return 0
