"""The command ``veilboost``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dp_components.errors import PrivacyError
from he_processors.errors import VeilBoostError
from nvflare_plugins.cli.parsers import make_parser
from nvflare_plugins.formatting import printable


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
