"""How commands of ``veilboost`` are declared: options beside functions, which click reads.

What a command does is imported once it runs: XGBoost, FLARE and pandas take seconds, and help, completion or a word
about wrong usage needs none of them. So modules with commands import what is heavy inside their functions.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.formatting import printable

if TYPE_CHECKING:
    from nvflare_plugins.data.declaration import DataSet
    from nvflare_plugins.site.policy import SitePolicy

PATH = click.Path(path_type=Path, readable=False)  # whoever opens a file says better what is wrong with it
DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What reading a run's files ends in where they are not as they were written: their fields are looked at where used."""
SETTINGS: dict[str, Any] = {"max_content_width": 120, "help_option_names": ["-h", "--help"]}
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


EXITS = {0: "done", 1: "refused or failed", 2: "wrong usage", 130: "interrupted by Ctrl-C"}
"""Exit codes of every command, where it declares no other meaning."""


class Options(SimpleNamespace):
    """What a command line says: a value for each option and argument.

    Attributes:
        command: name of the command.
        func: what it runs; it takes these options and returns the exit code.
        prints_json: whether that prints JSON by itself where ``json`` asks for it.
        result: what it has to say to programs, by name; ``--json`` prints it.
        progress: takes how much is done, and of how much, as the command goes on.
    """

    command: str
    func: Callable[[Options], int]
    prints_json: bool
    result: dict[str, Any]
    progress: Callable[[int, int], None]

    def tell(self, **result: Any) -> None:
        """Say something to programs: dataclasses, paths and moments are written as JSON."""
        self.__dict__.setdefault("result", {}).update(result)


OWN = tuple(Options.__annotations__)
"""Attributes of options that no option of a command line gives."""


class SeveralValues(click.Option):
    """An option that takes all values up to the next option."""

    def __init__(self, names: Iterable[str], **attributes: Any) -> None:
        super().__init__([*names], multiple=True, **attributes)

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """Return the values; None if it was not given."""
        return super().process_value(ctx, value) or None


class Command(click.Command):
    """A command that shows its description as it stands, and takes no option for the value of another.

    Attributes:
        exits: exit code -> what it means.
    """

    exits: dict[int, str] = EXITS

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line."""
        return super().parse_args(ctx, args if ctx.resilient_parsing else [*self._spread(ctx, args)])

    def _spread(self, ctx: click.Context, args: list[str]) -> Iterator[str]:
        """Yield the arguments, options by their whole names, and with one before each of its values."""
        known = {name: one for one in self.get_params(ctx) if isinstance(one, click.Option) for name in one.opts}
        left = deque(args)
        while left:
            word = _whole(left.popleft(), known)
            yield word
            if word == "--":
                yield from left
                return
            option = known.get(word)
            if option is None or option.is_flag:
                continue
            if not left or _looks_like_option(left[0]):
                raise click.BadParameter("expected an argument", ctx, option)
            yield left.popleft()
            while isinstance(option, SeveralValues) and left and not _looks_like_option(left[0]):
                yield word
                yield left.popleft()

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description."""
        codes = "; ".join(f"{code} {meaning}" for code, meaning in sorted(self.exits.items()))
        formatter.write(f"\n{self.help}\n\nExit code: {codes}.\n")


def _whole(word: str, known: Iterable[str]) -> str:
    """Return an option that begins like one alone under its whole name, and anything else as it is."""
    name, equals, value = word.partition("=")
    meant = [one for one in known if one.startswith(name)] if name.startswith("--") and name not in known else []
    return f"{meant[0]}{equals}{value}" if len(meant) == 1 and name != "--" else word


def _looks_like_option(text: str) -> bool:
    return len(text) > 1 and text.startswith("-") and " " not in text and not _NUMBER.fullmatch(text)


def command(
    words: str,
    *parameters: click.Parameter,
    one_of: tuple[str, str] | None = None,
    prints_json: bool = False,
    exits: Mapping[int, str] = {},
) -> Callable[[Callable[[Options], int]], Command]:
    """Return what makes a function a command of its name, whose docstring describes it under ``--help``.

    Args:
        words: for the list of commands.
        parameters: options and arguments; each command has ``--json`` too.
        one_of: names of two options that do not go together.
        prints_json: the function prints JSON by itself, if asked to.
        exits: exit codes that mean something else, or more, than those of every command.
    """

    def declare(run: Callable[[Options], int]) -> Command:
        name = run.__name__.replace("_", "-")

        def take(**values: Any) -> Options:
            if one_of is not None and all(values[option] is not None for option in one_of):
                first, second = (f"--{option.replace('_', '-')}" for option in one_of)
                raise click.UsageError(f"argument {second}: not allowed with argument {first}")
            lists = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
            return Options(command=name, func=run, prints_json=prints_json, result={}, progress=_unseen, **lists)

        as_json = option("--json", is_flag=True, help="print JSON instead of text")
        made = Command(
            name,
            callback=take,
            params=[*parameters, as_json],
            help=inspect.getdoc(run),
            short_help=words,
            context_settings=SETTINGS,
        )
        made.exits = {**EXITS, **exits}
        return made

    return declare


def _unseen(done: int, of: int) -> None:
    """Take progress that nobody sees."""


def option(*names: str, **attributes: Any) -> click.Option:
    """Return an option. One that may be repeated (``multiple``) ends in a list."""
    return click.Option([*names], **attributes)


def argument(name: str, **attributes: Any) -> click.Argument:
    """Return an argument."""
    return click.Argument([name], **attributes)


WORKSPACE = option("--workspace", metavar="DIR", type=PATH, required=True, help="the site's workspace")
SITE = option("--site", metavar="NAME", required=True, help="the site's name")
ROOT_CERTIFICATE = "rootCA.pem"


def column_names(text: str) -> list[str]:
    """Return names of columns, separated by commas or as a list in JSON."""
    try:
        found = json.loads(text) if text.startswith("[") else [name.strip() for name in text.split(",")]
    except ValueError:
        raise click.BadParameter('give names separated by commas, or as JSON: ["a", "b"]') from None
    return [str(name) for name in found]


FILE_OPTIONS = (
    option(
        "--names", metavar="COLUMN,COLUMN...", type=column_names, help="columns of a file in which no line names them"
    ),
    option("--format", type=click.Choice(["csv", "parquet"]), help="of a file (default: as it begins)"),
)
"""How a file is read that a command line names."""


def as_data_set(options: Options, path: Path, like: DataSet, name: str) -> DataSet:
    """Return a file as a data set that is read as another one is, but for what the command line says."""
    from nvflare_plugins.data.tabular_files import format_in

    kind = options.format or format_in(path)
    names = tuple(options.names or ()) or (like.names if kind == "csv" else ())
    memory = like.memory if kind == "parquet" else None  # how much is held of the other one does not matter
    changes: dict[str, Any] = {"path": path.absolute(), "format": kind, "names": names, "memory": memory}
    return replace(like, name=name, loader=None, max_rows=0, **changes)


def own_policy(options: Options) -> SitePolicy:
    """Return the policy of the site that ``workspace`` and ``site`` name. Raises: ConfigurationError."""
    from nvflare_plugins.site.policy import SitePolicy, own_workspace

    return SitePolicy.load(own_workspace(options.workspace, options.site), options.site)


def check_output(option: str, path: Path, *suffixes: str) -> None:
    """Refuse a name that might be that of another file (a ledger, a model, a log), before any work is done.

    Args:
        option: whose argument it is, for the message.
        suffixes: what such files end in.

    Raises:
        ConfigurationError: it has another ending, or cannot be a file there.
    """
    shown = printable(str(path))
    if path.suffix.lower() not in suffixes:
        raise ConfigurationError(f"{option} {shown}: the name must end in {' or '.join(suffixes)}")
    if path.is_dir():
        raise ConfigurationError(f"{option} {shown} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ConfigurationError(f"{option} {shown} lies in a folder that is not there: make it first")
