"""``veilboost site-setup``: prepare a site's FLARE workspace for VeilBoost jobs."""

from __future__ import annotations

import argparse
from typing import Any

from nvflare_plugins.site.setup import SetupOptions, added, check_files, set_up, warnings_of


def run(args: argparse.Namespace) -> int:
    """Do it, and say what has changed."""
    options = SetupOptions(
        dict(args.data_sets),
        tuple(args.profiles),
        tuple(args.consents),
        args.min_sites,
        args.max_colluders,
        dict(args.ids),
        dict(args.budgets),
        tuple(args.allow),
        args.keep_in,
        _readers(args),
        dict(args.statement),
        tuple(args.added_profiles),
    )
    check_files(args.folder, options.data_sets)
    changes = set_up(args.folder, options)
    print("\n".join(changes) if changes else "nothing to change: everything is set up already")
    for warning in warnings_of(args.folder):
        print(warning)
    return 0


def _readers(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the reader's options by data set; those that can be repeated are put together."""
    readers: dict[str, dict[str, Any]] = {}
    for option, given in vars(args).items():
        for name, value in given if option.startswith("reader_") else ():
            reader = readers.setdefault(name, {})
            key = option.removeprefix("reader_")
            reader[key] = added(reader.get(key, []), value)
    return readers
