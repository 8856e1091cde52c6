"""The command ``veilboost``.

What a terminal shows of a command that takes longer than two seconds: a bar, or the seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import click

from dp_components.errors import PrivacyError
from he_processors.errors import VeilBoostError
from nvflare_plugins.base.checks import check_path_letters
from nvflare_plugins.base.errors import reason_of
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.cli import evidence, models, sites, training
from nvflare_plugins.cli.options import SETTINGS, Options

_FIRST_S, _NEXT_S = 2.0, 0.2
_WIDTH = 24
_CLEAR = "\r\x1b[K"


class Waiting:
    """Draws on the error stream of a terminal while a command works; elsewhere, and before two seconds, nothing.

    Calling it says how much is done.
    """

    def __init__(self, command: str, *, is_quiet: bool = False) -> None:
        self._command, self._share, self._is_quiet = command, 0.0, is_quiet
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._is_drawn = False
        self._thread: threading.Thread | None = None
        self._out: Any = None

    def __call__(self, done: int, of: int) -> None:
        """Take how much is done, and of how much."""
        self._share = done / max(of, 1)

    def __enter__(self) -> Self:
        """Begin to wait, where somebody looks on."""
        if sys.stderr.isatty() and not self._is_quiet:
            self._out, sys.stdout = sys.stdout, _Clearing(self, sys.stdout) if sys.stdout.isatty() else sys.stdout
            self._thread = threading.Thread(target=self._draw, args=(time.monotonic(),), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Take the bar away."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            self.clear()
            sys.stdout = self._out

    def clear(self) -> None:
        """Take the bar away until it is drawn again."""
        with self._lock:
            if self._is_drawn:
                sys.stderr.write(_CLEAR)
                sys.stderr.flush()
            self._is_drawn = False

    def _draw(self, began: float) -> None:
        pause = _FIRST_S
        while not self._is_over.wait(pause):
            pause = _NEXT_S
            n_full = round(self._share * _WIDTH)
            bar = f"[{'#' * n_full}{'.' * (_WIDTH - n_full)}] {self._share:.0%}, " if self._share else ""
            with self._lock:
                sys.stderr.write(f"{_CLEAR}veilboost {self._command}: {bar}{time.monotonic() - began:.0f} s")
                sys.stderr.flush()
                self._is_drawn = True


class _Clearing:
    """Standard output that takes the bar away before anything is written beside it."""

    def __init__(self, waiting: Waiting, out: Any) -> None:
        self._waiting, self._out = waiting, out

    def write(self, text: str) -> int:
        """Write."""
        self._waiting.clear()
        written: int = self._out.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        """Return what else standard output has."""
        return getattr(self._out, name)


_INTERRUPTED = 130  # as shells say it
_TALKING = ("score",)  # with who types at the terminal, between whose lines no bar belongs


class _Commands(click.Group):
    """The commands in the order in which they are declared."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return their names."""
        return list(self.commands)


COMMANDS: dict[str, click.Command] = {
    one.name or "": one
    for one in (
        training.demo,
        sites.site_setup,
        sites.check,
        sites.agree,
        training.plan,
        evidence.verify,
        evidence.report,
        models.compare,
        models.predict,
        models.release,
        models.export,
        models.scorecard,
        models.score,
        sites.snapshot,
        models.models,
        models.runs,
        models.drift,
        evidence.dossier,
        sites.registry,
        sites.forget,
        sites.ledger,
        sites.backup,
        sites.watch,
    )
}
_VEILBOOST = click.version_option(
    package_name="veilboost", message="veilboost %(version)s", help="print the version and leave"
)(
    _Commands(
        "veilboost",
        commands=COMMANDS,
        help="Private federated XGBoost for NVIDIA FLARE, on the stock XGBoost wheel.",
        no_args_is_help=False,
        context_settings=SETTINGS,
    )
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: ``options.EXITS``, and what the command declares beside them."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a column's name may have letters that the terminal lacks
    options = parse(arguments)
    try:
        for argument in sys.argv[1:] if arguments is None else arguments:
            check_path_letters("an argument", argument)
        code = _run(options)
        sys.stdout.flush()  # what cannot be written must not look well
        return code
    except (VeilBoostError, PrivacyError) as error:
        return _said(options, str(error), 1)
    except BrokenPipeError:  # whoever reads has read enough
        _let_go_of_output()
        return 1
    except (OSError, MemoryError) as error:
        name = getattr(error, "filename", None)
        where = "" if name is None else f"{os.fsdecode(name) if isinstance(name, bytes) else name}: "
        code = _said(options, where + reason_of(error), 1)
        try:
            sys.stdout.flush()
        except OSError:  # or Python tries again when it ends, and has an exit code of its own for that
            _let_go_of_output()
        return code
    except KeyboardInterrupt:
        return _said(options, "interrupted", _INTERRUPTED)


def _let_go_of_output() -> None:
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return what a command line says.

    Raises:
        SystemExit: it asked for help or the version (0), or cannot be read (2); both have been said.
    """
    try:
        options = _VEILBOOST.main(None if arguments is None else [*arguments], "veilboost", standalone_mode=False)
    except click.UsageError as error:
        _refuse(error)
    if not isinstance(options, Options):
        sys.exit(0)
    return options


def _refuse(error: click.UsageError) -> NoReturn:
    """Say what is wrong with a command line, and leave."""
    text = error.format_message()
    if isinstance(error, click.BadParameter) and error.param is not None:
        is_option = isinstance(error.param, click.Option)
        name = "/".join(error.param.opts) if is_option else error.param.human_readable_name
        is_missing = isinstance(error, click.MissingParameter)
        text = f"the following arguments are required: {name}" if is_missing else f"argument {name}: {error.message}"
    if error.ctx is not None:
        print(error.ctx.get_usage(), file=sys.stderr)
    print(f"{error.ctx.command_path if error.ctx else 'veilboost'}: error: {text}", file=sys.stderr)
    sys.exit(2)


def _run(options: Options) -> int:
    """Run the command; put into JSON what it prints, where that was asked for and it does not do so by itself."""
    with Waiting(options.command, is_quiet=options.command in _TALKING) as options.progress:
        if not options.json or options.prints_json:
            return options.func(options)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = options.func(options)
    _print_json(options, code, **options.result, lines=printed.getvalue().splitlines())
    return code


def _print_json(options: Options, code: int, **told: object) -> None:
    document = {"command": options.command, "exit_code": code, **told}
    print(json.dumps(_as_json(document), indent=2, allow_nan=False))


def _as_json(value: object) -> object:
    """Return values as JSON has them: what is no number is null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _as_json(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(getattr(value, "value", value))


def _said(options: Options, text: str, code: int) -> int:
    lines = "\n".join(printable(line, 2000) for line in text.splitlines())  # it may quote a peer, a job or a path
    print(f"veilboost {options.command}: {lines}", file=sys.stderr)
    if options.json:
        _print_json(options, code, error=lines)
    return code


if __name__ == "__main__":
    sys.exit(main())
