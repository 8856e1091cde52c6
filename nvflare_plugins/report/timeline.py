"""When each stage of a round ran at this site: a strip for each round, with a lane for each stage."""

from __future__ import annotations

from collections.abc import Sequence

from nvflare_plugins.formatting import number
from nvflare_plugins.report.charts import WIDTH
from nvflare_plugins.report.pages import figure
from nvflare_plugins.report.run_record import RoundRow

_STAGES = (
    ("encrypt", "encryption", 2),
    ("receive", "reading", 6),
    ("histogram", "sums of ciphertexts", 4),
    ("pack", "packing", 5),
    ("hide", "hiding", 5),
    ("decrypt", "decryption", 5),
    ("prepare", "made ahead", 1),
    ("network", "waiting for others", 3),
)
_NAMES = frozenset(key for key, _, _ in _STAGES)
_MOST_ROUNDS = 12
_LEFT, _RIGHT, _LANE, _GAP = 190, 18, 15, 16


def timeline(rounds: Sequence[RoundRow]) -> str:
    """Return the strips as HTML; nothing for rounds without spans.

    Where there are many rounds, some are shown, the first and the last among them.
    """
    known = [row for row in rounds if any(stage in _NAMES for stage, _, _ in row.spans)]
    if not known:
        return ""
    n = min(len(known), _MOST_ROUNDS)
    shown = [known[round(i * (len(known) - 1) / max(n - 1, 1))] for i in range(n)]
    longest = max(max((end for _, _, end in row.spans), default=0.0) for row in shown) or 1.0
    scale = (WIDTH - _LEFT - _RIGHT) / longest
    strips, top = [], 4
    for row in shown:
        lanes, first = [], top
        for key, name, colour in _STAGES:
            spans = [
                (_LEFT + begin * scale, max((end - begin) * scale, 0.4), f"{name}: {number(begin)} to {number(end)} s")
                for stage, begin, end in row.spans
                if stage == key
            ]
            if spans:
                lanes.append((name, colour, top, spans))
                top += _LANE
        strips.append((row.round + 1, first, lanes))
        top += _GAP
    words = (
        f"What ran when, at this site alone, {n} of {len(known)} rounds; lanes above one another ran at the same time. "
        f"The axis is {number(longest)} s long."
    )
    return figure("timeline", width=WIDTH, height=top, words=words, rounds=strips, label_at=_LEFT - 8)
