"""The command line of a script that makes jobs: write their folders, run one in the simulator."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from nvflare.recipe import SimEnv

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.recipes.recipe import JobRecipe
from nvflare_plugins.site.policy_values import POLICY_FILE
from nvflare_plugins.site.setup import set_up


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


@dataclass(frozen=True, slots=True)
class OwnFiles:
    """The sites' files of a job, and what the policies must say so that the job may read them.

    Attributes:
        write: writes the sites' files below a folder.
        policy: keys of the policy with their values, where the files lie below a folder.
    """

    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "--data": {"type": Path, "metavar": "DIR", "help": "write the sites' files below this folder"}
    }
    write: Callable[[Path], None]
    policy: Callable[[Path], dict[str, Any]]

    def prepare(self, root: Path, name: str) -> None:
        """Write the files below ``root``/data, and set up ``root``/``name``: there FLARE looks for the job."""
        self.write(root / "data")
        set_up(root / name)
        path = root / name / POLICY_FILE
        document = json.loads(path.read_text()) | self.policy(root.absolute() / "data")
        write_atomically(path, json.dumps(document, indent=2).encode() + b"\n")

    def write_if_asked(self, args: Namespace) -> bool:
        """Do what the option ``--data`` asks for, and say what the sites' policies must have."""
        if args.data is not None:
            self.write(args.data)
            needed = json.dumps(self.policy(args.data.absolute()), indent=1)
            sys.stdout.write(f"the sites' files are in {args.data}; each policy needs\n{needed}\n")
        return args.data is not None
