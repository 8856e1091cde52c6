"""Which rows a job over pooled rows leaves out, because persons asked to be forgotten: at this site alone.

What is left out, by which rule and why: ``site/memory/forgetting.py``. Whether a job may leave out a batch, all sites
find out together (``row_floors.are_enough``).
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import OnLostSite, SiteContext
from nvflare_plugins.attempt.run_folder import MODEL, RunFolder
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import usable_ids
from nvflare_plugins.data.table import Table
from nvflare_plugins.pages.run_record import FILE_NAME as RECORD
from nvflare_plugins.site.memory.forgetting import ASKED, Forgetting, Queue, Standing, ToForget
from nvflare_plugins.site.memory.registry import Registry, Used
from nvflare_plugins.xgb.continuation import state_of

_WHY = f"{ASKED}, or that the job to be replaced did not have"
_log = logging.getLogger(__name__)


def leave_out(
    table: Table, spec: DataSet, context: SiteContext, replaces: str | None, *, with_consent: bool = False
) -> tuple[Table, ToForget | None]:
    """Return the rows that a job may use, and whom it leaves out as a batch, where it is to forget persons.

    Args:
        table: with the ids, where somebody is in the queue.
        replaces: the job whose model is trained again; None of other jobs.
        with_consent: persons leave this data set under the consent ``recompute_with_changes`` alone.

    Raises:
        ConfigurationError: this site knows of no such job on the data set that has ended well.
    """
    forgetting = Forgetting(context.policy)
    queue = forgetting.queue(spec.name)
    if not queue.keys.size and replaces is None:
        return table, None
    place = _places(forgetting, queue, table, spec)
    is_forgotten = (place >= 0) & (queue.standing[place] == Standing.FORGOTTEN) if queue.keys.size else place >= 0
    table, place = table.kept(~is_forgotten, ASKED), place[~is_forgotten]
    if replaces is None and not (place >= 0).any():
        return table, None
    used = Registry.open(context.policy).used(table, spec, replaces)
    out = (place >= 0) & ~used.by_any
    if replaces is None:
        return table.kept(~out, ASKED), None
    if used.by_base is None:
        raise ConfigurationError(
            f"{context.site} remembers no job {replaces} on data set {spec.name!r} that has ended well, whose model "
            "could be trained again without persons. Remedy: name such a job (forgets); `veilboost registry` lists them"
        )
    consents = context.policy.consents.recompute_with_changes
    chosen = _chosen(queue, place, used, consents=consents, with_consent=with_consent)
    out |= ~used.by_base | np.isin(place, chosen)
    _log.info("forgetting, %s: %d persons leave the job", spec.name, chosen.size)
    whom = ToForget(replaces, queue.keys[chosen], may_lack_sites=_agreed_to_lose_sites(context, replaces))
    return table.kept(~out, _WHY), whom


def _places(forgetting: Forgetting, queue: Queue, table: Table, spec: DataSet) -> NDArray[np.int64]:
    """Return where the person of each row stands in the queue, -1 for all others. Shapes: int64[n_rows]."""
    if not queue.keys.size or table.ids is None:
        return np.full(table.n_rows, -1)
    return queue.places(forgetting.keys(usable_ids(table.ids, spec)))


def _chosen(
    queue: Queue, place: NDArray[np.int64], used: Used, *, consents: bool, with_consent: bool
) -> NDArray[np.int64]:
    """Return the places of those who leave: the batch that was begun, or all who wait and whose rows are all alike.

    Who has rows of another class waits, unless this site consents. Who has none leaves nothing behind.
    """
    if with_consent and not consents:
        return np.empty(0, dtype=np.int64)
    standing = queue.standing
    if (standing == Standing.LEAVING).any():
        return np.flatnonzero(standing == Standing.LEAVING)
    waiting = np.flatnonzero(standing == Standing.WAITING)
    unlike = place[(place >= 0) & used.by_any & ~used.by_all]
    return waiting if consents else waiting[~np.isin(waiting, unlike)]


def _agreed_to_lose_sites(context: SiteContext, job_id: str) -> bool:
    """Return whether the sites of an earlier job have consented that the others go on without any of them."""
    try:
        record = json.loads((RunFolder(context.runs, job_id).path / RECORD).read_bytes())
        return bool(record["settings"].get("on_lost_site") == OnLostSite.CONTINUE.value)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def check_start(context: SiteContext, model: bytes, jobs: tuple[str, ...]) -> None:
    """Refuse to go on from a model that saw rows of persons who are forgotten.

    Args:
        jobs: that made the model, as far as that is known.

    Raises:
        ConfigurationError: it is one of those that were replaced.
    """
    for job, by in Forgetting(context.policy).replaced().items():
        if job in jobs or _is_state_of(RunFolder(context.runs, job).path / MODEL, model):
            raise ConfigurationError(
                f"{context.site} does not go on from the model of job {job}, which has seen rows of persons who are "
                f"forgotten. Remedy: go on from job {by}, which replaces it"
            )


def _is_state_of(path: Path, model: bytes) -> bool:
    try:
        return state_of(path.read_bytes()) == state_of(model)
    except (OSError, ValueError, LookupError, TypeError):  # a run whose model is gone
        return False
