"""``veilboost registry``: what a site remembers of earlier releases, and of refusals because of its rows."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from he_processors.errors import ConfigurationError
from nvflare_plugins.site.data_refusals import Question, RefusalCount
from nvflare_plugins.site.memory.alignments import AlignmentRegistry
from nvflare_plugins.site.memory.registry import Registry
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy import SitePolicy, own_workspace


def run(options: argparse.Namespace) -> int:
    """Show it, copy it, or reset its counts."""
    workspace = own_workspace(options.workspace, options.site)
    policy = SitePolicy.load(workspace, options.site)
    if not Memory.is_there(policy):  # a wrong name too leads to no folder, and must not make one
        raise ConfigurationError(
            f"{options.site} remembers nothing: there is no registry in {policy.registry}; or its workspace or name is "
            "another."
        )
    if options.backup is not None:
        return _back_up(Memory.open(policy), options.backup)
    refusals = RefusalCount(policy)
    if options.reset_refusals is not None:
        refusals.reset(policy.data_set(options.reset_refusals).name)
        print(f"the refusals of data set {options.reset_refusals!r} are counted from now on")
        return 0
    print(Registry.open(policy).describe())
    print(AlignmentRegistry.open(policy).describe())
    limit = policy.data_refusals_per_month
    for name, count in refusals.counts().items():
        print(f"data set {name!r}: {count} of {limit} jobs that its rows may refuse within a month")
    for name, count in refusals.counts(Question.DEMAND).items():
        print(f"data set {name!r}: {count} of {limit} jobs that asked for more rows than this site's policy does")
    return 0


def _back_up(memory: Memory, target: Path) -> int:
    try:
        memory.back_up(target)
    except OSError as error:
        print(f"veilboost registry: {target} was not written: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{target} holds what {memory.site} remembers. To restore it, stop FLARE and put it in the place of")
    print(f"{memory.path}, without a file that ends in -journal beside it.")
    return 0
