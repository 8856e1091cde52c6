"""The command line of a script that makes jobs: write their folders, run one in the simulator."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from nvflare.recipe import SimEnv

from he_processors.errors import ConfigurationError
from nvflare_plugins.recipes.job_recipe import JobRecipe


def run_script(
    text: str | None,
    write: Callable[[Namespace], list[Path]],
    start: Callable[[Namespace], tuple[JobRecipe, int]],
    names: Collection[str] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    also: Callable[[Namespace], bool] = lambda args: False,
) -> None:
    """Read the command line and do what it asks for.

    Args:
        text: the script's docstring, which ``--help`` shows.
        write: writes the job folders (``--write``) and returns where they are.
        start: prepares data and workspace of a run (``--run``); returns the job and the number of simulated sites.
        names: what ``--run`` chooses from; a script of a single job has none.
        options: further options, with the arguments of ``add_argument``.
        also: does what these ask for; returns whether that was anything.
    """
    parser = ArgumentParser(description=text, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write every job folder of this script anew")
    choice: dict[str, Any] = {"choices": list(names)} if names else {"action": "store_true"}
    parser.add_argument("--run", help="run the job in the simulator", **choice)
    parser.add_argument("--workspace", type=Path, help="root of the simulator's workspaces; --run needs it")
    for name, arguments in (options or {}).items():
        parser.add_argument(name, **arguments)
    args = parser.parse_args()
    try:
        has_done = also(args)
        for path in write(args) if args.write else []:
            sys.stdout.write(f"wrote {path}\n")
        if args.run and args.workspace is None:
            raise ConfigurationError("--run needs --workspace")
        started = start(args) if args.run else None
    except ConfigurationError as error:
        parser.error(str(error))
    if started is not None:
        job, n_sites = started
        job.execute(SimEnv(num_clients=n_sites, workspace_root=str(args.workspace)))
    elif not (args.write or has_done):
        parser.error("give --write or --run; --help says what else there is")
