"""When each stage of a round ran at this site: a strip for each round, with a lane for each stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nvflare_plugins.formatting import markup
from nvflare_plugins.report.charts import WIDTH, number
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
_MOST_ROUNDS = 12
_LEFT, _RIGHT, _LANE, _GAP = 190, 18, 15, 16


def timeline(rounds: Sequence[RoundRow]) -> Iterator[str]:
    """Return the strips as HTML; nothing for rounds without spans.

    Where there are many rounds, some are shown, the first and the last among them.
    """
    known = [row for row in rounds if any(stage in _NAMES for stage, _, _ in row.spans)]
    if not known:
        return
    n = min(len(known), _MOST_ROUNDS)
    shown = [known[round(i * (len(known) - 1) / max(n - 1, 1))] for i in range(n)]
    longest = max(max((end for _, _, end in row.spans), default=0.0) for row in shown) or 1.0
    parts: list[str] = []
    top = 4
    for row in shown:
        top = _draw(row, top, longest, parts)
    yield (
        f"<p class=muted>What ran when, at this site alone, {n} of {len(known)} rounds; lanes above one another ran at "
        f"the same time. The axis is {number(longest)} s long.</p>"
    )
    yield f'<svg viewBox="0 0 {WIDTH} {top}" role="img" aria-label="stages by time">{"".join(parts)}</svg>'


def _draw(row: RoundRow, top: int, longest: float, parts: list[str]) -> int:
    """Draw one round; return where the next one begins."""
    parts.append(f'<text x="4" y="{top + 12}" class="label">round {row.round + 1}</text>')
    for key, name, colour in _STAGES:
        spans = [(begin, end) for stage, begin, end in row.spans if stage == key]
        if not spans:
            continue
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 10}" text-anchor="end" class="tick">{markup(name)}</text>')
        for begin, end in spans:
            left, width = _LEFT + begin / longest * _ROOM, max((end - begin) / longest * _ROOM, 0.4)
            parts.append(
                f'<rect x="{left:.1f}" y="{top + 1}" width="{width:.1f}" height="{_LANE - 3}" fill="var(--c{colour})">'
                f"<title>{markup(name)}: {number(begin)} to {number(end)} s</title></rect>"
            )
        top += _LANE
    return top + _GAP


_NAMES = frozenset(key for key, _, _ in _STAGES)
_ROOM = WIDTH - _LEFT - _RIGHT
