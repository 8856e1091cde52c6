"""A run's entries in the site's registry, one for each data set: they stand at all sites, or at none."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.data_sets.declaration import DataSet
from nvflare_plugins.data_sets.table import Table
from nvflare_plugins.site.memory.registry import Registry, Reservation, ResumePoint

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, repr=False)
class Wanted:
    """What a run wants to look at.

    Attributes:
        ids: what names the rows, where something does.
        draw: see ``registry.describe_draw``.
        may_grow: the run has the sites count the rows added since earlier ones, see ``Registry.reserve``.
        is_settled: the run calls ``grown`` or ``cancel``.
        continues: jobs whose model the run continues.
    """

    table: Table
    data_set: DataSet
    ids: Sequence[bytes] | None = None
    draw: str = ""
    may_grow: bool = False
    is_settled: bool = False
    continues: tuple[str, ...] = ()


class Reservations:
    """The entries of one run; use ``reserve_together``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.entries: list[Reservation] = []  # the training set's first

    @property
    def message(self) -> str:
        """What the registry says of the training set, in one sentence."""
        return self.entries[0].message

    def trees_complete(self, n_trees: int) -> None:
        """Note, durably, how far the run has come: a lost job is resumed from no later tree."""
        for entry in self.entries:
            self._registry.trees_complete(entry, n_trees)

    def complete(self, n_trees: int) -> None:
        """Note that the run has ended well."""
        for entry in self.entries:
            self._registry.complete(entry, n_trees)

    def cancel(self) -> None:
        """Forget a run that ended before anything about rows had left this site."""
        for entry in self.entries:
            self._registry.cancel(entry)

    def grown(self, is_enough: bool) -> None:
        """Settle added rows, see ``Registry.grown``. Raises: DataRefusal, PolicyRefusal."""
        for entry in self.entries:
            self._registry.grown(entry, is_enough)

    @contextmanager
    def cancelled_by(self, *errors: type[BaseException]) -> Iterator[None]:
        """Forget the run if one of these errors ends what is done here."""
        try:
            yield
        except errors:
            self.cancel()
            raise


def reserve_together(
    attempt: SiteAttempt, registry: Registry, wanted: Iterable[Wanted], parameters: bytes, resume: ResumePoint | None
) -> Reservations:
    """Go on once every site's registry has allowed the run; else it has released nothing and is remembered nowhere.

    Args:
        parameters: what decides what the run releases about the rows (``Registry.reserve``).

    Raises:
        DataRefusal: this site's registry refuses.
        ConfigurationError: there is nothing to resume, or the registry is damaged.
        VeilBoostError: another site has ended the attempt.
    """
    reservations, context = Reservations(registry), attempt.context
    with reservations.cancelled_by(BaseException):
        for one in wanted:
            entry = registry.reserve(
                one.table,
                one.data_set,
                job_id=context.job_id,
                sites=context.sites,
                parameters=parameters,
                resume=resume,
                beside=reservations.entries,
                ids=one.ids,
                draw=one.draw,
                may_grow=one.may_grow,
                is_settled=one.is_settled,
                continues=one.continues,
            )
            reservations.entries.append(entry)
            _log.info("registry, %s: %s", one.data_set.name, entry.message)
        attempt.gather_sealed("registry", b"")
    return reservations
