"""Time that does not show what was searched for: it is drawn out to a power of two of a public step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

STEP_S = 1 / 16


def draw_out(
    since_s: float,
    step_s: float = STEP_S,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until 1, 2, 4, 8, ... steps have passed since a moment; call it also when what was done has failed.

    Security: whoever waits for what follows learns which of these, and no more, if it knows the moment: that is when
        its last message came, and not when a search began. Units: seconds.

    Args:
        since_s: the moment, by the clock.
    """
    spent = clock() - since_s
    sleep(due(spent, step_s) - spent)


def due(spent_s: float, step_s: float) -> float:
    """Return the least power of two of steps that is not less than the time spent. Units: seconds."""
    return step_s * float(2 ** max(0, math.ceil(math.log2(max(spent_s, step_s) / step_s))))
