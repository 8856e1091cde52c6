"""What every tuning asks of a site first, and how its errors say where they came."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from he_processors.errors import PolicyRefusal, VeilBoostError
from nvflare_plugins.failures import DataRefusal
from nvflare_plugins.site.policy.policy import SitePolicy


class Sized(Protocol):
    """How much a tuning trains."""

    @property
    def data_set(self) -> str: ...
    @property
    def folds(self) -> int: ...
    @property
    def num_rounds(self) -> int: ...
    @property
    def n_of_trials(self) -> int: ...
    @property
    def size(self) -> int: ...


def check_consent(policy: SitePolicy, job: Sized) -> None:
    """Check the site's consent to so many trainings. Raises: PolicyRefusal."""
    if job.size > policy.consents.tuning or not policy.consents.gives("tuning"):
        raise PolicyRefusal(
            f"the policy of {policy.site} allows trials x folds x rounds of at most {policy.consents.tuning} in one "
            f"tuning, and the job asks for {job.n_of_trials} x {job.folds} x {job.num_rounds} = {job.size}. Policy "
            f"key: consents.tuning. Remedy: fewer trials, folds or rounds, or ask {policy.site} to change it."
        )
    if policy.data_set(job.data_set).privacy is not None:
        raise PolicyRefusal(
            f"data set {job.data_set!r} of {policy.site} has a privacy budget, and the models of a tuning are not "
            f"charged to it. Policy key: data_sets.{job.data_set}.privacy. Remedy: tune on a data set of other rows "
            "without a budget"
        )


@contextmanager
def in_trial(number: int, n_trials: int, fold: int | None = None, n_folds: int = 0) -> Iterator[None]:
    """Let an error say in which trial it came; a public number."""
    try:
        yield
    except DataRefusal:  # its text is the same whatever it was
        raise
    except VeilBoostError as error:
        where = f"trial {number} of {n_trials}" + ("" if fold is None else f", fold {fold} of {n_folds}")
        raise type(error)(f"{error} ({where})") from None
