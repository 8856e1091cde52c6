"""``veilboost report``: rebuild the report of a run, or make a page of it for a data-protection officer."""

from __future__ import annotations

import argparse
import sys

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.cli.outputs import DAMAGED, check_output
from nvflare_plugins.cli.verify import DOES_NOT_SHOW, SHOWS, said, trusted, verify
from nvflare_plugins.pages.report import write_report
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.pages.summary import build_summary


def run(arguments: argparse.Namespace) -> int:
    """Write it, and say where. Raises: OSError, which the command tells as of any other."""
    try:
        if arguments.output is not None:
            check_output("--out", arguments.output, ".html")
        print(_summary(arguments) if arguments.summary else _report(arguments))
    except (ConfigurationError, ProtocolError) as error:
        print(f"veilboost report: {printable(str(error), 2000)}", file=sys.stderr)
        return 1
    except DAMAGED:  # a record is read as it was written: what its fields hold is looked at where it is used
        text = f"run.json or the model in {arguments.run_folder} is damaged, or of another version: copy the run again"
        print(f"veilboost report: {printable(text, 2000)}", file=sys.stderr)
        return 1
    return 0


def _report(arguments: argparse.Namespace) -> object:
    if arguments.evidence or arguments.root_ca is not None:
        raise ConfigurationError("--evidence and --root-ca belong to --summary; `veilboost verify` checks evidence")
    return write_report(arguments.run_folder, arguments.output)


def _summary(arguments: argparse.Namespace) -> object:
    """Write the page whole or not at all, for its owner alone: it counts rows."""
    if arguments.output is None:
        raise ConfigurationError("--summary needs a file to write: --out FILE.html")
    record = RunRecord.read(arguments.run_folder)
    html = build_summary(record, arguments.run_folder, _verification(arguments, record))
    return write_atomically(arguments.output, html.encode(), 0o600)


def _verification(arguments: argparse.Namespace, record: RunRecord) -> list[str]:
    """Return what ``veilboost verify`` says of the exported evidence that was named; nothing if none was."""
    if not arguments.evidence:
        if arguments.root_ca is not None:
            raise ConfigurationError("--root-ca needs --evidence: the exported logs of all parties")
        return []
    root, servers = trusted(arguments.root_ca, arguments.evidence)
    result = verify(arguments.evidence, root, servers, record.job_id)
    return [*said(result), *((SHOWS, DOES_NOT_SHOW) if result.sound else ())]
