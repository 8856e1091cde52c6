"""``veilboost snapshot``: rows of a site's database into a dated file that jobs read."""

from __future__ import annotations

import argparse

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.formatting import counted
from nvflare_plugins.data.part_files import snapshots_in
from nvflare_plugins.site.policy import SitePolicy, own_workspace
from nvflare_plugins.site.snapshot import take_snapshot


def run(options: argparse.Namespace) -> int:
    """Take one, or list what there is."""
    policy = SitePolicy.load(own_workspace(options.workspace, options.site), options.site)
    if options.keep is not None and options.keep < 1:
        raise ConfigurationError("--keep: at least 1, the new one")
    if options.name is None:
        return _list(policy)
    if options.name not in policy.snapshots:
        known = ", ".join(sorted(policy.snapshots)) or "none"
        raise ConfigurationError(
            f"{options.site} has no snapshot {options.name!r} (known: {known}). Policy key: snapshots."
        )
    taken = take_snapshot(policy.snapshots[options.name], options.keep)
    held = (
        "the database held the query to reading" if taken.read_only else "the database cannot hold a query to reading"
    )
    print(f"{taken.path}: {counted(taken.n_rows, 'row')}, {counted(taken.n_columns, 'column')}; {held}")
    for path in taken.removed:
        print(f"{path}: removed")
    return 0


def _list(policy: SitePolicy) -> int:
    if not policy.snapshots:
        print("the policy names no snapshot. Policy key: snapshots")
    for name, source in sorted(policy.snapshots.items()):
        found = [path for path, of in snapshots_in(source.folder).items() if of == name]
        print(f"{name}: {counted(len(found), 'snapshot')} in {source.folder}")
        for path in found:
            print(f"  {path.name}, {path.stat().st_size:,} bytes{', the newest' if path == found[-1] else ''}")
    return 0
