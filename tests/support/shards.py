"""Sites of a federation whose rows are in shards, over workers that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.workers.worker_connection import PartHost
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


class OtherMount:
    """A worker that finds the folder "other" where the site's process has its own."""

    def __init__(self, folder: str) -> None:
        self._host, self._folder = PartHost(), f"/{folder}/".encode()

    def ask(self, function: str, *args: Any) -> tuple[str, Any, str]:
        answer: tuple[str, Any, str] = getattr(self._host, function)(*self._elsewhere(args))
        return answer

    def _elsewhere(self, value: Any) -> Any:
        if isinstance(value, bytes) and value.endswith(b".parquet"):
            return value.replace(self._folder, b"/other/")
        if isinstance(value, list | tuple):
            return type(value)(map(self._elsewhere, value))
        return {key: self._elsewhere(one) for key, one in value.items()} if isinstance(value, dict) else value
