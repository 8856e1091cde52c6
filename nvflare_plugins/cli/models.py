"""``veilboost models``: the models that a site has from its jobs, their names, and which version is in use."""

from __future__ import annotations

import argparse

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.scoring.versions import ModelVersions, describe, is_number
from nvflare_plugins.site.policy import SitePolicy, own_workspace


def run(options: argparse.Namespace) -> int:
    """List, name, or go back."""
    workspace = own_workspace(options.workspace, options.site)
    versions = ModelVersions(SitePolicy.load(workspace, options.site).runs)
    action, given = options.action, options.arguments
    if action == "list" and not given:
        unread: list[str] = []
        print(describe(versions.found(unread), versions.names()))
        for text in unread:
            print(f"left out: {printable(text, 1000)}")
    elif action == "add" and len(given) == 2:
        name, job = given
        print(f"job {job} is {name}@{versions.add(name, job)}, which `veilboost predict {name}` uses from now on")
    elif action == "rollback" and len(given) == 2 and is_number(given[1]):
        name, version = given[0], int(given[1])
        before = versions.use(name, version)
        print(f"`veilboost predict {name}` uses {name}@{version} from now on; before it was {name}@{before}")
    else:
        raise ConfigurationError("give nothing to list the models, or: add NAME JOB_ID, or: rollback NAME VERSION")
    return 0
