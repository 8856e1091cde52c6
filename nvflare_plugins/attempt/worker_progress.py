"""What a party's workers do, in lines for its own log: with its rounds, and in long silences between them.

A worker is asked nothing for it: the site knows what it waits for, since when, and how long each answer has taken.

Privacy: lines hold numbers of workers, seconds and counts of this site's rows, and go where its other progress goes.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from nvflare_plugins.attempt.job_context import Progress
from nvflare_plugins.pages.run_record import RoundRow
from nvflare_plugins.workers.workers import Work, Workers

EVERY_S = 10.0
"""Between two lines; in a silence the next one comes after twice as long. Units: seconds."""
LONGEST_S = 60.0
MOST_NAMED = 8
"""So many workers are told one by one; of more, what is least, usual and most."""
SLOW_LINES, SLOWER, COST = 3, 1.5, 0.2
"""A worker is a straggler that was the slowest on so many lines in a row, so many times as long busy as the others
usually are, and cost so much of the time."""
_LOOK_S = 1.0
_DOES = {
    "begin": "is set up",
    "encrypt": "encrypts",
    "fill": "prepares to encrypt",
    "add_gradients": "takes encrypted pairs",
    "sum_bins": "adds pairs into bins",
    "sum_share": "adds pairs into bins",
    "decrypt": "opens sums",
    "open_points": "opens sums",
    "prepare": "prepares to hide sums",
    "multiply": "blinds",
    "train": "trains",
    "listen": "trains",
    "reply": "trains",
    "": "waits",
}
REMEDY = (
    "Remedy: see what else its machine does, and whether it has as many cores to use (VEILBOOST_THREADS) as theirs; or "
    "leave it out (cluster.workers takes the first by name)."
)


class WorkersProgress:
    """Progress with lines on workers among the others. Any thread may call it.

    Args:
        clock: ``time.perf_counter``, of which ``Work`` keeps its times.
    """

    def __init__(self, work: Sequence[Work], progress: Progress, clock: Callable[[], float] = time.perf_counter):
        self._work, self._inner, self._clock = work, progress, clock
        self._lock = threading.Lock()
        self._quiet_since = clock()
        self._patience_s = EVERY_S
        self._at_line = self._at_look = self._seen()
        self._first: int | None = None
        self._slowest: tuple[int | None, int] = (None, 0)
        self._named: set[int] = set()

    def __call__(self, record: RoundRow, n_rounds: int) -> None:
        """Take note of a finished round."""
        self._inner(record, n_rounds)
        done = record.round + 1
        with self._lock:
            self._quiet_since, self._patience_s = self._clock(), EVERY_S
            self._first = done if self._first is None else self._first
            is_due = done >= n_rounds or self._quiet_since - self._at_line.now >= EVERY_S
            lines = self._of_rounds(self._first, done) if is_due else []
        self._say(lines)

    def say(self, text: str) -> None:
        """Write one line."""
        self._inner.say(text)

    def note_workers(self, work: Sequence[Work]) -> None:
        """Pass it on."""
        self._inner.note_workers(work)

    def look(self) -> None:
        """Say what the workers do now, where nothing was said for a while and they have done something."""
        with self._lock:
            lines, now = [], self._clock()
            if now - self._quiet_since >= self._patience_s:
                lines = self._of_now()
                self._quiet_since = now
                self._patience_s = min(2 * self._patience_s, LONGEST_S) if lines else EVERY_S
        self._say(lines)

    def _say(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._inner.say(line)

    # -- what is said -------------------------------------------------------------------------------------------------

    def _of_rounds(self, first: int, last: int) -> list[str]:
        before, self._at_line = self._at_line, self._seen()
        self._at_look, self._first = self._at_line, None
        rounds = f"round {last}" if first == last else f"rounds {first} to {last}"
        wall = self._at_line.now - before.now
        told = [
            f"{number} busy {busy:.1f} s ({_share(busy, wall)}){rows}"
            for number, (busy, rows) in enumerate(zip(*self._done_since(before, self._at_line), strict=True))
        ]
        busy = self._at_line.busy_since(before)
        return [f"workers in {rounds} ({wall:.1f} s): {_together(told, busy, wall)}", *self._straggler(busy, wall)]

    def _of_now(self) -> list[str]:
        before, self._at_look = self._at_look, self._seen()
        wall, busy = self._at_look.now - before.now, self._at_look.busy_since(before)
        if max(busy) < 0.01 * wall:  # all wait for other sites, or for this site's process
            return []
        doing = [(_DOES.get(one.asked, "works"), one.told if one.asked else None) for one in self._work]
        told = [
            f"{number} {_telling(does, said)} (busy {_share(own, wall)}){rows}"
            for number, ((does, said), own, rows) in enumerate(
                zip(doing, *self._done_since(before, self._at_look), strict=True)
            )
        ]
        if len(told) > MOST_NAMED:
            groups = Counter(does if said is None else said[0] for does, said in doing)
            come = [said for _, said in doing if said is not None and said[2]]
            rows = f"; {sum(one[1] for one in come):,} of {sum(one[2] for one in come):,} rows" if come else ""
            told = [", ".join(f"{n} x {does}" for does, n in groups.items()) + rows]
            return [f"workers now: {told[0]}; {_range(busy, wall)}", *self._straggler(busy, wall)]
        return [f"workers now, and in the last {wall:.0f} s: {', '.join(told)}", *self._straggler(busy, wall)]

    def _done_since(self, before: _Seen, now: _Seen) -> tuple[list[float], list[str]]:
        rows = []
        for was, own in zip(before.rows, now.rows, strict=True):
            more = {word: n - was.get(word, 0) for word, n in own.items()}
            rows.append("".join(f", {n:,} rows {word}" for word, n in more.items() if n))
        return now.busy_since(before), rows

    def _straggler(self, busy: Sequence[float], wall: float) -> list[str]:
        """Return a line on a worker for which the others have waited for some time, once for each such worker."""
        if len(busy) < 2 or wall < EVERY_S / 2:
            return []
        slowest = max(range(len(busy)), key=lambda number: busy[number])
        usual = statistics.median(own for number, own in enumerate(busy) if number != slowest)
        is_slow = busy[slowest] >= SLOWER * usual and busy[slowest] - usual >= COST * wall
        worker, n_lines = self._slowest
        self._slowest = (slowest, n_lines + 1 if worker == slowest else 1) if is_slow else (None, 0)
        if self._slowest[1] < SLOW_LINES or slowest in self._named:
            return []
        self._named.add(slowest)
        return [
            f"worker {slowest} of this site's cluster is much slower than the others, which wait for it: it was busy "
            f"for {busy[slowest]:.1f} s of the last {wall:.1f} s, they for {usual:.1f} s. {REMEDY}"
        ]

    def _seen(self) -> _Seen:
        now = self._clock()
        return _Seen(now, [one.seconds_until(now) for one in self._work], [dict(one.rows) for one in self._work])


class _Seen:
    """What the workers had done at a moment."""

    def __init__(self, now: float, seconds: list[float], rows: list[dict[str, int]]):
        self.now, self._seconds, self.rows = now, seconds, rows

    def busy_since(self, before: _Seen) -> list[float]:
        return [max(now - was, 0.0) for was, now in zip(before._seconds, self._seconds, strict=True)]


def _telling(does: str, said: tuple[str, int, int] | None) -> str:
    if said is None:
        return does
    return f"{said[0]}, {said[1]:,} of {said[2]:,}" if said[2] else said[0]


def _together(told: Sequence[str], busy: Sequence[float], wall: float) -> str:
    if len(told) > MOST_NAMED:
        return _range(busy, wall)
    slowest = max(range(len(busy)), key=lambda number: busy[number])
    return "; ".join(told) + (f"; the slowest is {slowest}" if len(told) > 1 else "")


def _range(busy: Sequence[float], wall: float) -> str:
    slowest = max(range(len(busy)), key=lambda number: busy[number])
    return (
        f"{len(busy)} busy {min(busy):.1f} to {max(busy):.1f} s, usually {statistics.median(busy):.1f} s; the slowest "
        f"is {slowest} ({_share(busy[slowest], wall)})"
    )


def _share(busy: float, wall: float) -> str:
    return f"{100 * min(busy / wall, 1.0) if wall > 0 else 0:.0f} %"


@contextmanager
def watched(workers: Workers | None, progress: Progress) -> Iterator[Progress]:
    """Yield progress with what the workers do; the same progress where there are none.

    ``with watched(workers, attempt.progress) as attempt.progress:``
    """
    if workers is None:
        yield progress
        return
    watching, over = WorkersProgress(workers.work, progress), threading.Event()
    watching.note_workers(workers.work)

    def run() -> None:
        while not over.wait(_LOOK_S):
            watching.look()

    thread = threading.Thread(target=run, name="veilboost_workers", daemon=True)
    thread.start()
    try:
        yield watching
    finally:
        over.set()
        thread.join(_LOOK_S)
