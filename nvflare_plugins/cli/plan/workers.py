"""What a vertical training takes where each party has workers of its own: seconds, bytes and memory for each number.

The rows of a party are divided among its workers, and so is the opening of sums. What is not divided: what goes through
a party's process, the encrypted pairs above all, and what workers send one another: each nearly all of its sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from he_processors.errors import ConfigurationError
from nvflare_plugins.data_sets.cluster_declaration import MOST_WORKERS
from nvflare_plugins.formatting import human_bytes, human_seconds, table_lines

if TYPE_CHECKING:
    from nvflare_plugins.cli.plan.vertical import CipherRates, VerticalEstimate, VerticalWorkload

INNER_BYTES_PER_S = 1.25e9
"""Assumed of the line between a party's process and its workers: 10 Gbit/s."""
_PAIR_BYTES, _ROW_BYTES = 16, 4  # of a pair of gradients, and of a row's number in a node


@dataclass(frozen=True, slots=True)
class WorkersEstimate:
    """For so many workers at each party. Units: seconds and bytes per tree; bytes of memory.

    Attributes:
        s: of a tree, one step after the other, with a core for each worker; an upper estimate.
        limited_by: the step that takes most of it.
        party_bytes: most that goes through one party's process, to its workers and from them.
        worker_memory: most that one worker holds.
    """

    workers: int
    s: float
    limited_by: str
    party_bytes: int
    worker_memory: int


def estimate_workers(
    workload: VerticalWorkload, rates: CipherRates, estimate: VerticalEstimate, process_bytes: int, most: int
) -> list[WorkersEstimate]:
    """Estimate 1, 2, 4, ... workers at each party, up to ``most``.

    Raises:
        ConfigurationError: more workers than a policy may name, or than there are rows.
    """
    if not 1 <= most <= min(MOST_WORKERS, workload.rows):
        raise ConfigurationError(f"--workers must be from 1 to {MOST_WORKERS}, and at most the number of rows")
    counts = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [_estimate(workload, rates, estimate, process_bytes, n) for n in (*counts, most)]


def _estimate(
    workload: VerticalWorkload, rates: CipherRates, estimate: VerticalEstimate, process_bytes: int, n: int
) -> WorkersEstimate:
    upload = workload.rows * rates.ciphertext_bytes
    active_bytes = upload + workload.rows * _PAIR_BYTES
    passive_bytes = [upload + round(workload.built_rows) * _ROW_BYTES for _ in workload.foreign]
    exchanged = max(_partial_bytes(workload, rates, party) for party in range(len(workload.foreign)))
    # What is not divided, and what more workers make longer, beside what is.
    steps = {
        "encrypting": estimate.encrypt_s / n,
        "adding and hiding": max(one.core_s for one in estimate.passives) / n,
        "opening": estimate.open_s / n,
        "between a party's workers": exchanged * (n - 1) / n / INNER_BYTES_PER_S,
        "a party's line to its workers": (active_bytes + max(passive_bytes)) / INNER_BYTES_PER_S,
        "the line between the parties": estimate.network_s,
    }
    rows = -(-workload.rows // n)
    memory = process_bytes + max(
        rows * (rates.in_memory + features * (1 if workload.bins < 256 else 2)) for features in workload.foreign
    )
    return WorkersEstimate(
        n, sum(steps.values()), max(steps, key=lambda name: steps[name]), max(active_bytes, *passive_bytes), memory
    )


def _partial_bytes(workload: VerticalWorkload, rates: CipherRates, party: int) -> int:
    """Return the bytes of one worker's sums of a tree, before they are packed."""
    return workload.built_nodes * workload.slots_of(party) * rates.ciphertext_bytes


def render_workers(found: list[WorkersEstimate]) -> str:
    """Return the estimates as text."""
    table = [("workers at each party", "a tree", "most of it", "through a party's process", "memory of a worker")]
    for one in found:
        sizes = human_bytes(one.party_bytes), human_bytes(one.worker_memory)
        table.append((str(one.workers), f"{human_seconds(one.s)}", one.limited_by, *sizes))
    return "\n".join(["", "", *table_lines(table), "", f"  - {_ASSUMED}"])


_ASSUMED = (
    f"a worker computes like one thread of this machine, and reaches its party at {INNER_BYTES_PER_S / 1.25e8:g} "
    "Gbit/s; steps come one after the other, which overlap in a real run"
)
