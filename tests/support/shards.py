"""Sites of a federation whose rows are in shards, over workers that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest

from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.workers.workers import Workers
from tests.support.workers_here import workers_here

SITES = (
    "nvflare_plugins.kinds.horizontal.site",
    "nvflare_plugins.kinds.private_trees.training",
    "nvflare_plugins.kinds.tuning.site",
)


def in_shards(
    monkeypatch: pytest.MonkeyPatch,
    n_shards: Mapping[str, int],
    make: Callable[[int], Workers] = workers_here,
) -> None:
    """Cut the rows of sites, by name, into shards; those of the other sites stay in one process."""

    @contextmanager
    def workers_of(policy: SitePolicy, data_set: str) -> Iterator[Workers | None]:
        if policy.site not in n_shards:
            yield None
            return
        with make(n_shards[policy.site]) as workers:
            yield workers

    monkeypatch.setattr(
        "nvflare_plugins.pooled.preparation.shards_of", lambda policy, data_set: n_shards.get(policy.site, 1)
    )
    for site in SITES:
        monkeypatch.setattr(f"{site}.workers_of", workers_of)
