"""``veilboost watch``: a kit's numbers for its monitoring, also while no job runs."""

from __future__ import annotations

from datetime import UTC, datetime

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.cli.options import Options
from nvflare_plugins.flare.metrics import FOLDER_VARIABLE, metrics_folder
from nvflare_plugins.flare.watch import run as watch
from nvflare_plugins.site.flare_boundary import Role
from nvflare_plugins.site.runtimes import site_name
from nvflare_plugins.site.setup import workspaces


def run(options: Options) -> int:
    """Write until the process is ended, or once."""
    folder = metrics_folder()
    if folder is None or not folder.is_dir():
        raise ConfigurationError(f"the environment variable {FOLDER_VARIABLE} names no folder: set it as for FLARE")
    kits = workspaces(options.kit)
    if len(kits) != 1 or kits[0][1] is Role.SIMULATOR:
        raise ConfigurationError(f"{options.kit} is not the startup kit of one site or server")
    kit, role = kits[0][0].absolute(), kits[0][1]
    who, wrong = "server" if role is Role.SERVER else site_name(kit), ""
    for wrong in watch(kit, role, who, folder, None if options.once else options.every):
        at = datetime.now(UTC).isoformat(timespec="seconds")
        print(f"{at}  {printable(wrong, 1000) or 'all numbers are written'}", flush=True)
    return 1 if wrong else 0
