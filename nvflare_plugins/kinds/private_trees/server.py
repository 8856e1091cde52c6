"""The server's part where it is trusted with exact sums: it adds the noise, once, and says so in its evidence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting import PrivacyCost, compose
from dp_components.events import Release
from dp_components.mechanisms import add_gaussian_noise
from dp_components.sensitivity import Sensitivity
from he_processors.errors import ProtocolError
from nvflare_plugins.attempt.payment import event_text
from nvflare_plugins.kinds.private_trees.job import JobPlan
from nvflare_plugins.kinds.private_trees.releases import ReleaseSchedule
from nvflare_plugins.wire.envelope import Codec, Frame, Phase

Mechanism = Callable[[NDArray[np.int64], Sensitivity, float], Release]
"""Adds noise to an exact query: (sums, sensitivity, noise multiplier) -> release. ``add_gaussian_noise`` is one."""

Spend = Callable[[str, str, float, float], None]
"""``EvidenceLog.spend``: (query, event, epsilon so far, delta)."""


class TrustedServer:
    """Turns each exact sum of a job into a noisy one.

    Security: the server sees exact sums over all sites, and no single site's part. The noise comes from its operating
        system.
    Privacy: one release per exchange, no more of them than the plan has: the aggregator keeps the answer for retries.
    """

    def __init__(self, plan: JobPlan, mechanism: Mechanism = add_gaussian_noise) -> None:
        self._job, self._mechanism = plan.job, mechanism
        self._due = ReleaseSchedule(plan.releases)
        self._spent = PrivacyCost()

    def answer(self, frame: Frame, total: bytes, spend: Spend) -> bytes:
        """Return the noisy sum of one exchange.

        Raises:
            ProtocolError: a sum that the plan does not pay for now, in kind, number or size.
        """
        number = frame.moment.round if frame.moment.phase is Phase.UPDATE else -1
        planned = self._due.take(frame.kind, number, frame.n_values)
        if frame.codec is not Codec.MASKED:
            raise ProtocolError(f"{frame.kind.name}: not a masked sum")
        self._spent = self._spent + compose(planned.event)
        noise = planned.noise
        exact = np.frombuffer(total, dtype="<i8").reshape(-1, noise.n_coordinates)
        try:
            noisy = self._mechanism(exact, noise.sensitivity, noise.multiplier).value
        except ValueError:
            raise ProtocolError(f"{frame.kind.name}: the sites' sum is beyond all bounds") from None
        job = self._job
        epsilon = self._spent.for_person(job.rows_per_person).epsilon(job.delta)
        spend(f"{frame.kind.name} at {frame.moment}", event_text([planned.event]), epsilon, job.delta)
        return noisy.astype("<i8").tobytes()
