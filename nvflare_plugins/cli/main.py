"""The command ``veilboost``."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

from dp_components.errors import PrivacyError
from he_processors.errors import VeilBoostError
from nvflare_plugins.base.checks import check_path_letters
from nvflare_plugins.base.failures import reason_of
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.cli.parsers import make_parser

_INTERRUPTED = 130  # as shells say it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code: 0 well, 1 refused or failed, 2 wrong usage; ``verify`` has more.

    130 is for Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a column's name may have letters that the terminal lacks
    options = make_parser().parse_args(arguments)
    try:
        for argument in sys.argv[1:] if arguments is None else arguments:
            check_path_letters("an argument", argument)
        code = options.func(options) or 0
        sys.stdout.flush()  # what cannot be written must not look well
        return code
    except (VeilBoostError, PrivacyError) as error:
        return _said(options.command, str(error), 1)
    except BrokenPipeError:  # whoever reads has read enough
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, MemoryError) as error:
        name = getattr(error, "filename", None)
        where = "" if name is None else f"{os.fsdecode(name) if isinstance(name, bytes) else name}: "
        return _said(options.command, where + reason_of(error), 1)
    except KeyboardInterrupt:
        return _said(options.command, "interrupted", _INTERRUPTED)


def _said(command: str, text: str, code: int) -> int:
    lines = (printable(line, 2000) for line in text.splitlines())  # it may quote a peer, a job or a path
    print(f"veilboost {command}: " + "\n".join(lines), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
