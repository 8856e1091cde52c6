"""Planted defects, and how many seeds each survives: ``make mutants``, or ``python -m tests.simulation.mutants``.

A simulation that finds nothing says something only if it finds these.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from dp_components import ledger
from dp_components.ledger import Journal, Ledger
from he_processors import masks
from he_processors.key_agreement import SEALED_OVERHEAD_BYTES, SealedBox
from he_processors.sum_tags import PairMacs, SumTags
from nvflare_plugins.attempt import site_attempt
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.attempt.site_attempt import Reservations, SiteAttempt
from nvflare_plugins.base import files
from nvflare_plugins.evidence import reader
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.flare import executor
from nvflare_plugins.flare.attempt import ServerAttempt
from nvflare_plugins.flare.timeouts import LifeSigns
from nvflare_plugins.flare.transport import FrameServer, SiteTransport
from nvflare_plugins.flare.work import Watch
from nvflare_plugins.growth.rows import HeldRows
from nvflare_plugins.kinds.dpboost.server import DpBoostServer, KeptAnswers
from nvflare_plugins.kinds.horizontal import going_on
from nvflare_plugins.kinds.horizontal import site as horizontal_site
from nvflare_plugins.kinds.horizontal.going_on import GradientMoves
from nvflare_plugins.kinds.private_trees.training import Payment
from nvflare_plugins.pooled import spans
from nvflare_plugins.site.memory import forgetting
from nvflare_plugins.wire.aggregation import Aggregator, WordSum
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.envelope import Frame
from tests.simulation.run import ends_at_once, simulate, undisturbed

Mutant = Callable[[], AbstractContextManager[Any]]
MOST = 300


def _instead(place: Any, name: str, what: Any) -> Mutant:
    return lambda: patch.object(place, name, what)


def _nothing(*arguments: object, **named: object) -> None:
    """Do nothing."""


def _other_os(**names: Any) -> SimpleNamespace:
    """Return the module ``os`` of which some functions are others; what it has is looked up when it is called."""

    class Other(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    return Other(**names)


# -- messages ---------------------------------------------------------------------------------------------------------


@contextmanager
def _resends_differ() -> Iterator[None]:
    send, count = SiteTransport._send_frame, [0]

    def again(self: SiteTransport, frame: bytes) -> None:
        count[0] += 1
        send(self, frame[:-1] + bytes([frame[-1] ^ (count[0] & 1)]))

    with patch.object(SiteTransport, "_send_frame", again):
        yield


@contextmanager
def _late_replies_count() -> Iterator[None]:
    on_reply = SiteTransport._on_reply

    def taken(self: SiteTransport, message: Any) -> None:
        message.headers["veilboost"] = [
            message.headers["veilboost"][0],
            self._number,
            *message.headers["veilboost"][2:],
        ]
        on_reply(self, message)

    with patch.object(SiteTransport, "_on_reply", taken):
        yield


@contextmanager
def _answers_early() -> Iterator[None]:
    recorded = Aggregator._recorded

    def early(self: Aggregator, site: str, exchange: Any, frame: Any, committed: Any) -> None:
        if frame.operation.name == "SUM" and exchange.n_recorded == 1:
            exchange.n_recorded += 1
            exchange.heads = {**exchange.heads, **{r: frame for r in range(3) if r not in exchange.heads}}
        recorded(self, site, exchange, frame, committed)

    with patch.object(Aggregator, "_recorded", early):
        yield


@contextmanager
def _the_dead_are_not_named() -> Iterator[None]:
    lose = ServerAttempt.lose
    with patch.object(ServerAttempt, "lose", lambda self, sites, reason: lose(self, sites, "a site is gone")):
        yield


@contextmanager
def numbers_are_answered_again() -> Iterator[None]:
    """Let sites answer whatever attempt a server asks for; evidence is put wherever there is room."""
    put_aside = site_attempt.put_aside

    def anywhere(evidence: Path, number: int, *signer: Any) -> None:
        while evidence.with_name(reader.before_attempt(number)).exists():
            number += 1
        put_aside(evidence, number, *signer)

    with patch.object(RunFolder, "enter", _nothing), patch.object(site_attempt, "put_aside", anywhere):
        yield


# -- sums and secrets -------------------------------------------------------------------------------------------------


@contextmanager
def _a_contribution_is_left_out() -> Iterator[None]:
    add, count = WordSum.add, [0]

    def most(self: WordSum, payload: bytes) -> None:
        count[0] += 1
        if count[0] % 40:
            add(self, payload)

    with patch.object(WordSum, "add", most):
        yield


@contextmanager
def _a_nonce_is_used_again() -> Iterator[None]:
    seal, count = SealedBox.seal, [0]

    def again(self: SealedBox, plaintext: bytes, associated_data: bytes = b"") -> bytes:
        sealed = seal(self, plaintext, associated_data)
        count[0] += 1
        if count[0] % 7 == 0:
            seal(_rewound(self), plaintext + b".", associated_data)
        return sealed

    with patch.object(SealedBox, "seal", again):
        yield


def _rewound(box: SealedBox) -> SealedBox:
    twin = SealedBox.__new__(SealedBox)
    twin._cipher, twin._next_counter = box._cipher, box._next_counter - 1
    return twin


@contextmanager
def _nothing_is_sealed() -> Iterator[None]:
    def seal(self: SealedBox, plaintext: bytes, associated_data: bytes = b"") -> bytes:
        return bytes(SEALED_OVERHEAD_BYTES) + plaintext

    def open_(self: SealedBox, sealed: bytes, associated_data: bytes = b"") -> bytes:
        return sealed[SEALED_OVERHEAD_BYTES:]

    with patch.object(SealedBox, "seal", seal), patch.object(SealedBox, "open", open_):
        yield


@contextmanager
def _masks_forget_the_counter() -> Iterator[None]:
    info = masks._info

    def without(label: Any, modulus: int | None) -> bytes:
        return info(masks.MessageLabel(0, label.kind, label.phase, label.n_values), modulus)

    with patch.object(masks, "_info", without):
        yield


@contextmanager
def _errors_name_the_folder() -> Iterator[None]:
    check, text, seen = executor.check_set_up, executor.error_text, [Path()]

    def checked(workspace: Path, name: str) -> None:
        seen[0] = workspace
        check(workspace, name)

    with ExitStack() as stack:
        stack.enter_context(patch.object(executor, "check_set_up", checked))
        stack.enter_context(patch.object(executor, "error_text", lambda error: f"{text(error)} (in {seen[0]})"))
        yield


@contextmanager
def _parts_are_not_checked() -> Iterator[None]:
    def unchecked(self: PairMacs, sender: int, message: bytes, place: Any) -> bytes:
        return message[: len(message) - self.size]

    with patch.object(PairMacs, "check", unchecked):
        yield


@contextmanager
def _risks_are_of_the_round_before() -> Iterator[None]:
    risk_words = HeldRows.risk_words

    def before(self: HeldRows, n_rows: int) -> Any:
        kept = vars(self).setdefault("_risks_before", risk_words(self, n_rows))
        self._risks_before = risk_words(self, n_rows)
        return kept

    with patch.object(HeldRows, "risk_words", before):
        yield


# -- jobs of several attempts ------------------------------------------------------------------------------------------


@contextmanager
def _states_are_entered_twice() -> Iterator[None]:
    with (
        patch.object(going_on.Course, "_may_enter", lambda self, state, sites: True),
        patch.object(going_on.Course, "next_step", lambda self, model, sites: 0),
        patch.object(GradientMoves, "have_moved", lambda self, model, number, earlier: True),
    ):
        yield


@contextmanager
def _the_server_forgets() -> Iterator[None]:
    begin = DpBoostServer._note_attempt

    def begun(self: DpBoostServer, frame: Frame) -> None:
        is_new = frame.attempt not in self._attempts
        begin(self, frame)
        if is_new:
            del self._answered[-1:]

    with patch.object(DpBoostServer, "_note_attempt", begun):
        yield


@contextmanager
def _what_is_reserved_is_closed() -> Iterator[None]:
    prepare = Payment.__init__

    def prepared(self: Payment, *arguments: Any, **named: Any) -> None:
        prepare(self, *arguments, **named)
        self._is_kept = False

    with patch.object(Payment, "__init__", prepared):
        yield


# -- disks and what they remember -------------------------------------------------------------------------------------


@contextmanager
def _releases_are_not_charged() -> Iterator[None]:
    append = Ledger._append
    unless = lambda self, record: None if record.get("record") == "release" else append(self, record)  # noqa: E731
    with patch.object(Ledger, "_append", unless):
        yield


@contextmanager
def _answers_are_drawn_anew() -> Iterator[None]:
    release = Ledger.release

    def anew(self: Ledger, job_id: str, query: str, make: Any) -> Any:
        with self._locked() as state:
            known = state.jobs[job_id].replies if job_id in state.jobs else {}
            if query in known:
                return make().value
        return release(self, job_id, query, make)

    with patch.object(Ledger, "release", anew):
        yield


@contextmanager
def _the_head_comes_first() -> Iterator[None]:
    append = Journal.append

    def after_head(self: Journal, record: Any) -> None:
        line, check = ledger._line(record, self._check)
        for path in self.path.parent.parent.rglob(self.path.name.removesuffix(".ledger") + ".head"):
            head = ledger.Head(path)
            state = head.read()
            if state is not None:
                position = ledger.Position(self._offset + len(line), check)
                head.write(ledger.HeadState(position, None, state.spent))
        append(self, record)

    with patch.object(Journal, "append", after_head):
        yield


@contextmanager
def _errors_of_disks_are_swallowed() -> Iterator[None]:
    write = files.write_atomically

    def careless(path: Path, content: bytes, mode: int = 0o644) -> Path:
        with contextlib.suppress(OSError):
            return write(path, content, mode)
        return path

    with patch.object(files, "write_atomically", careless):
        yield


@contextmanager
def _a_checkpoint_says_a_round_more() -> Iterator[None]:
    write = RunFolder.write_checkpoint
    more = lambda self, n_rounds, *rest: write(self, n_rounds + 1, *rest)  # noqa: E731
    complete = Reservations.trees_complete
    trees = lambda self, n_trees: complete(self, n_trees + 1)  # noqa: E731
    with patch.object(RunFolder, "write_checkpoint", more), patch.object(Reservations, "trees_complete", trees):
        yield


@contextmanager
def _batches_are_done_at_once() -> Iterator[None]:
    read = forgetting.Batch.read

    def done(*arguments: Any) -> Any:
        batch = read(*arguments)
        batch.state = forgetting.Standing.FORGOTTEN
        return batch

    with patch.object(forgetting.Batch, "read", done):
        yield


@contextmanager
def _without_fsync(module: Any) -> Iterator[None]:
    with patch.object(module, "os", _other_os(fsync=_nothing)):
        yield


MUTANTS: dict[str, tuple[str, Mutant]] = {
    "a lost reply is not sent again": ("dpboost", _instead(FrameServer, "_answer_query", _nothing)),
    "a lost frame is not sent again": ("dpboost", _instead(SiteTransport, "_on_state", _nothing)),
    "frames sent again differ": ("dpboost", _resends_differ),
    "a late reply counts for the present exchange": ("dpboost", _late_replies_count),
    "a sum is answered before all sites are in it": ("horizontal", _answers_early),
    "the server waits for the dead": ("dpboost", _instead(ServerAttempt, "_is_silent", lambda self, site: False)),
    "the dead are not named": ("dpboost", _the_dead_are_not_named),
    "sites wait for a dead server": ("dpboost", _instead(SiteTransport, "server_silent_s", property(lambda self: 0.0))),
    "nobody is forgiven a pause": (
        "dpboost",
        _instead(LifeSigns, "silent_s", lambda self, name: 1e9 if self.has_begun(name) else 0.0),
    ),
    "sites give no signs of life": ("dpboost", _instead(SiteTransport, "beat", _nothing)),
    "the deadline of an exchange is never armed": ("dpboost", _instead(Aggregator, "expire", _nothing)),
    "sites wait without end for an answer": ("dpboost", _instead(executor, "site_timeout_s", lambda job: 1e9)),
    "work that hangs is waited for": ("dpboost", _instead(Watch, "look", _nothing)),
    "the work goes on after its end": ("dpboost", _instead(Watch, "_reason_to_stop", lambda self, work: None)),
    "a contribution is left out of a sum": ("horizontal", _a_contribution_is_left_out),
    "tags are not compared": (
        "horizontal",
        _instead(SumTags, "_tags", lambda self, values, residues, label: (np.zeros(2, np.uint64), True)),
    ),
    "rows at risk are those of the round before": ("horizontal_cox", _risks_are_of_the_round_before),
    "bins of times need no events": (
        "horizontal_cox",
        _instead(spans, "ask_spans", lambda sums, bits: [np.ones(one.shape[1:], dtype=bool) for one in bits]),
    ),
    "persons are forgotten when a run begins": ("horizontal_forgets", _batches_are_done_at_once),
    "a run does not take its batch": ("horizontal_forgets", _instead(forgetting.Queue, "take", _nothing)),
    "MACs of what is handed on are not checked": ("vertical", _parts_are_not_checked),
    "terms are not bound to the handshake": ("horizontal", _instead(site_attempt, "_binding", lambda *_: bytes(32))),
    "a nonce is used again": ("bagging", _a_nonce_is_used_again),
    "masks forget the counter": ("horizontal", _masks_forget_the_counter),
    "nothing is sealed": ("horizontal", _nothing_is_sealed),
    "errors name the folder of a site": ("dpboost", _errors_name_the_folder),
    "evidence has no end": ("bagging", _instead(EvidenceLog, "abandon", _nothing)),
    "evidence is not synced after a round": ("horizontal", _instead(EvidenceLog, "flush", _nothing)),
    "releases are not charged": ("private_trees", _releases_are_not_charged),
    "a question is answered anew": ("private_trees", _answers_are_drawn_anew),
    "the ledger is not synced": ("private_trees", lambda: _without_fsync(ledger)),
    "the ledger's head is written first": ("private_trees", _the_head_comes_first),
    "files are renamed before they are synced": ("horizontal", lambda: _without_fsync(files)),
    "a state is entered with other sites": ("horizontal_continue", _states_are_entered_twice),
    "nobody says who was lost": ("horizontal_continue", _instead(horizontal_site, "named", lambda sites: {})),
    "evidence excuses nobody": ("horizontal_continue", _instead(reader, "lost_of", lambda logs: frozenset())),
    "what is sent is not noted before": ("horizontal_continue", _instead(going_on.Course, "enter", _nothing)),
    "a trusted server forgets its last answer": ("dpboost_wait", _the_server_forgets),
    "the key of rows is each attempt's own": (
        "dpboost_wait",
        _instead(KeptAnswers, "agree", lambda self, attempt, offers, fresh: setattr(self, "key", fresh)),
    ),
    "what a lost attempt reserved is closed": ("private_trees_wait", _what_is_reserved_is_closed),
    "sites answer a number again": ("horizontal_wait", numbers_are_answered_again),
    "what time mends is final": ("horizontal_wait", _instead(executor, "time_mends", lambda error: False)),
    "a paused site says that it waits": ("horizontal_wait", _instead(executor.JobExecutor, "_pause", _nothing)),
    "a process that died takes its task again": ("horizontal_wait", _instead(executor, "noted_attempt", _nothing)),
    "folders are not synced": ("bagging", _instead(files, "sync_folder", _nothing)),
    "errors of a disk are swallowed": ("bagging", _errors_of_disks_are_swallowed),
    "nobody waits until all have written": ("horizontal", _instead(SiteAttempt, "all_have_written", _nothing)),
    "a checkpoint says a round more": ("horizontal", _a_checkpoint_says_a_round_more),
    "the registry is not told of the end": ("bagging", _instead(Reservations, "complete", _nothing)),
    "answers of other exchanges are taken": (
        "dpboost",
        _instead(Channel, "_check", lambda self, sent, answer: answer),
    ),
}


def _faults(kind: str, seed: int) -> list[str]:
    try:
        _, _, faults = simulate(kind, seed)
    except AssertionError as error:  # the scheduler's
        faults = [str(error)]
    except Exception as error:
        faults = [f"{type(error).__name__}: {error}"]
    return faults


def survived(name: str, most: int = MOST) -> int | None:
    """Return how many seeds a planted defect survives; None if all.

    Raises:
        AssertionError: the seed that finds it finds a fault without it as well.
    """
    kind, mutant = MUTANTS[name]
    undisturbed(kind)  # of the product, not of the mutant: it is kept
    for seed in range(most):
        with mutant():
            is_found = bool(_faults(kind, seed))
        if is_found:
            own = _faults(kind, seed)
            assert not own, f"{kind}, seed {seed}, without any defect: {own}"
            return seed
    return None


def _told(case: tuple[str, int]) -> tuple[str, int | None]:
    logging.disable(logging.CRITICAL)
    return case[0], survived(*case)


def main() -> int:
    """Say of each planted defect how many seeds it survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=MOST, help="seeds to try")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("names", nargs="*", help="defects; all without any")
    options = parser.parse_args()
    cases, found = [(name, options.most) for name in options.names or MUTANTS], {}
    with multiprocessing.get_context("fork").Pool(options.jobs, ends_at_once, maxtasksperchild=1) as pool:
        for name, seeds in pool.imap_unordered(_told, cases, chunksize=1):
            found[name] = seeds
            sys.stdout.write(f"| {name} | {MUTANTS[name][0]} | {'all' if seeds is None else seeds} |\n")
            sys.stdout.flush()
    alive = [name for name, seeds in found.items() if seeds is None]
    sys.stdout.write(json.dumps({"mutants": len(found), "survive": alive}) + "\n")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
