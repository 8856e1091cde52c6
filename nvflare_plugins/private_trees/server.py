"""The server's part where it is trusted with exact sums: it adds the noise, once, and says so in its evidence."""

from __future__ import annotations

from collections.abc import Callable

from dp_components.accounting.composition import PrivacyCost, compose
from dp_components.mechanisms.gaussian import add_gaussian_noise
from he_processors.errors import ProtocolError
from nvflare_plugins.privacy_ledger import event_text
from nvflare_plugins.private_trees.job_plan import JobPlan, PlannedMessage
from nvflare_plugins.private_trees.noise_plan import Mechanism, ServerNoise
from nvflare_plugins.wire.catalogue import Kind, Phase
from nvflare_plugins.wire.envelope import Codec, Frame

Spend = Callable[[str, str, float, float], None]
"""``EvidenceLog.spend``: (query, event, epsilon so far, delta)."""


class TrustedServer:
    """Turns each exact sum of a job into a noisy one.

    Security: the server sees exact sums over all sites, and no single site's part. The noise comes from its operating
        system.
    Privacy: one release per exchange, no more of them than the plan has: the aggregator keeps the answer for retries.
    """

    def __init__(self, plan: JobPlan, mechanism: Mechanism = add_gaussian_noise):
        self._plan = plan
        self._noise = ServerNoise(plan.training.noise, mechanism)
        self._due = list(plan.messages)
        self._spent = PrivacyCost()

    def answer(self, frame: Frame, total: bytes, spend: Spend) -> bytes:
        """Return the noisy sum of one exchange.

        Raises:
            ProtocolError: a sum that the plan does not pay for now, in kind, number or size.
        """
        event = self._plan.events_of(self._next(frame))
        self._spent = self._spent + compose(event)
        noisy = self._noise.release(frame, total)
        job = self._plan.job
        epsilon = self._spent.for_person(job.rows_per_person).epsilon(job.delta)
        spend(f"{frame.kind.name} at {frame.moment}", event_text([event]), epsilon, job.delta)
        return noisy

    def _next(self, frame: Frame) -> PlannedMessage:
        """Take the message from those that are due; a tree that ends early skips some."""
        number = frame.moment.round if frame.moment.phase is Phase.UPDATE else -1
        for i, message in enumerate(self._due):
            if (message.kind, message.round) == (frame.kind, number):
                fits = 0 < frame.n_values <= sum(message.sizes) and frame.codec is Codec.MASKED
                if not fits or (frame.n_values % 2 and frame.kind is not Kind.CELL_COUNTS):
                    raise ProtocolError(f"{frame.kind.name}: {frame.n_values} values are not what the plan pays for")
                self._due = self._due[i + 1 :]
                return message
        raise ProtocolError(f"{frame.kind.name} at {frame.moment}: the job's plan pays for no such sum now")
