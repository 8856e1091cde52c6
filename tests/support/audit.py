"""Lower bounds on a privacy loss from runs in two worlds, and the chance that a bug of a given size is caught.

World 1 has a canary row that world 0 lacks. An adversary sees everything that leaves the sites in one run and says
which world it was. Counting his errors over many runs of both worlds bounds the privacy loss from below, at a stated
confidence, whatever the mechanism is; a bound above what is claimed refutes the claim. The statistic and its threshold
are fixed before any run.

Reference: Nasr et al., Tight Auditing of Differentially Private Machine Learning (2023), section 4 (GDP bounds);
Clopper and Pearson (1934).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dp_components.mechanisms import add_noise, laplace_scales, share_scales
from dp_components.sensitivity import Norm
from he_processors.masks import MessageLabel, PairwiseMasks
from he_processors.sum_tags import SumTags
from nvflare_plugins.evidence.format import GENESIS, SERVER, SignedHead, chain_line, export_name, parse_line
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.kinds.private_trees import forest
from nvflare_plugins.kinds.private_trees.forest import train
from nvflare_plugins.kinds.private_trees.noisy_sums import NoisySums, Pay, without_ledger
from nvflare_plugins.kinds.private_trees.plan import PrivateTreesPlan
from nvflare_plugins.kinds.private_trees.training import OwnRows
from nvflare_plugins.wire.aggregation import Aggregator, Transfer
from nvflare_plugins.wire.channel import Channel, HeadExchange
from nvflare_plugins.wire.envelope import FrameType, Kind, commitment, unpack, unpack_list
from nvflare_plugins.wire.profiles import MaskedSums
from nvflare_plugins.wire.sums import ProtectedSums
from tests.support.federation import TIMEOUT_S, DirectTransport
from tests.support.private_trees import Part, trusted_server
from tests.support.seeded_randomness import SeededRandomness

CONFIDENCE = 0.999
"""Correct code is accused with a probability of at most 1 - CONFIDENCE over random seeds, and seeds are fixed."""


def upper_bound(n_errors: int, n_runs: int, alpha: float) -> float:
    """Return Clopper and Pearson's upper bound of an error rate; it fails with probability ``alpha`` at most."""
    if n_errors >= n_runs:
        return 1.0
    return float(stats.beta.ppf(1 - alpha, n_errors + 1, n_runs - n_errors))


@dataclass(frozen=True, slots=True)
class Errors:
    """An adversary's errors.

    Args:
        false_alarms: runs of world 0 in which he said 1.
        misses: runs of world 1 in which he said 0.
        n_runs: of each world.
    """

    false_alarms: int
    misses: int
    n_runs: int

    @classmethod
    def of(cls, without: NDArray[np.float64], with_canary: NDArray[np.float64], threshold: float = 0.0) -> Errors:
        """Count. Shapes: float64[n_runs] each, the statistic of every run; larger speaks for world 1."""
        if without.size != with_canary.size:
            raise ValueError("as many runs of one world as of the other")
        return cls(int((without > threshold).sum()), int((with_canary <= threshold).sum()), without.size)

    def mu(self, n_statistics: int = 1) -> float:
        """Return the lower bound of mu, if the truth is a Gaussian trade-off; below 0 it says nothing.

        Every point of a mu-GDP trade-off curve obeys alpha >= Phi(-mu - Phi^-1(beta)), so the bound refutes a claim of
        mu-GDP without any assumption about what was run.

        Args:
            n_statistics: how many statistics share the confidence.
        """
        first, second = self._rates(n_statistics)
        return float(stats.norm.isf(first) - stats.norm.ppf(second))

    def epsilon(self, n_statistics: int = 1) -> float:
        """Return the lower bound of a pure epsilon."""
        first, second = self._rates(n_statistics)
        return max(_log_ratio(1 - first, second), _log_ratio(1 - second, first))

    def _rates(self, n_statistics: int) -> tuple[float, float]:
        alpha = (1 - CONFIDENCE) / 2 / n_statistics
        return upper_bound(self.false_alarms, self.n_runs, alpha), upper_bound(self.misses, self.n_runs, alpha)


def _log_ratio(a: float, b: float) -> float:
    return math.log(a / b) if a > 0 else -math.inf


def gaussian_power(claimed_mu: float, true_mu: float, n_runs: int, n_statistics: int = 1, n_draws: int = 4000) -> float:
    """Return the probability that ``true_mu`` is noticed, when the adversary's statistic is the likelihood ratio.

    Draws are seeded. The threshold lies in the middle between the worlds, where both error rates are Phi(-mu / 2).
    """
    rng = np.random.default_rng(0)
    errors = rng.binomial(n_runs, stats.norm.cdf(-true_mu / 2), size=(n_draws, 2))
    bounds = [Errors(int(a), int(b), n_runs).mu(n_statistics) for a, b in errors]
    return float(np.mean(np.array(bounds) > claimed_mu))


def noise_p_value(noise: NDArray[np.float64]) -> float:
    """Return how plausible it is that standardised noise has variance 1: chi-square, as a lower tail in [0, 1].

    Shapes: noise: float64[n], in units of the standard deviation that is accounted. Near 0 is too little noise, near 1
    too much.
    """
    return float(stats.chi2(noise.size).cdf(float(np.sum(noise**2))))


SITES = ("site-1", "site-2", "site-3")
ADVERSARY, CANARY_SITE = 0, 2
Integers = NDArray[np.int64]
_THREADS = ThreadPoolExecutor(len(SITES))


class SiteRandomness(SeededRandomness):
    """A site's noise, repeatable; faults that are planted at one site know the site by it."""

    def __init__(self, seed: int, site: int) -> None:
        super().__init__(seed)
        self.site = site


def own_seeds(run: int) -> list[SiteRandomness]:
    """Give every site randomness of its own."""
    return [SiteRandomness(16 * run + rank, rank) for rank in range(len(SITES))]


@dataclass(frozen=True, slots=True)
class Setting:
    """What is audited, and which parts of it a test has exchanged.

    Args:
        parts: rows of each site, in the world without the canary.
        canary: one row.
        randomness: run -> the sites' randomness.
        server_noise: (run) -> the mechanism of a trusted aggregator.
        pays: (run, site) -> how that site pays.
        sends_twice: every site asks the server once more for each answer.
        n_attempts: the job is restarted after it has ended, as after a crash at its very end.
        evidence: where all parties keep logs, whose heads they exchange each round; None keeps none.
    """

    plan: PrivateTreesPlan
    parts: tuple[Part, ...]
    canary: Part
    randomness: Callable[[int], list[SiteRandomness]] = own_seeds
    server_noise: Callable[[int], Callable] = lambda run: partial(add_noise, randomness=SeededRandomness(16 * run + 8))
    pays: Callable[[int, int], Pay] = lambda run, site: without_ledger
    aggregator: type[Aggregator] = Aggregator
    sends_twice: bool = False
    n_attempts: int = 1
    evidence: Path | None = None

    def rows_of(self, site: int, has_canary: bool) -> Part:
        part = self.parts[site]
        if not has_canary or site != CANARY_SITE:
            return part
        return Part(
            np.concatenate([part.columns, self.canary.columns], axis=1),
            np.concatenate([part.label, self.canary.label]),
        )


# -- one run ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class View:
    """What the adversary sees of one attempt, query by query.

    Args:
        own: what he contributed himself, his noise included.
        replies: all sums that he got for it: several where the server answers a retry differently.
        frames: every byte that the server sent him.
        make_keys: the masks that he and his colluder share with site 3.
        folder: with the parties' logs.
    """

    own: list[Integers] = field(default_factory=list)
    replies: list[list[Integers]] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    make_keys: Callable[[], PairwiseMasks] | None = None
    folder: Path | None = None

    @property
    def totals(self) -> list[Integers]:
        """The sums that training went on with."""
        return [of_query[0] for of_query in self.replies]


class _WatchedMasks(MaskedSums):
    """The adversary's own protection: he writes down what he sends and gets."""

    def __init__(self, masks: PairwiseMasks, view: View, payloads: list[list[bytes]]) -> None:
        super().__init__(masks)
        self._view, self._payloads = view, payloads

    def protected(self, integers: Integers, label: object) -> memoryview:
        self._view.own.append(integers.copy())
        return super().protected(integers, label)

    def reveal(self, payload: bytes, label: object, *, wide: bool = False) -> Integers:
        total = super().reveal(payload, label, wide=wide)
        of_query = self._payloads[len(self._view.replies)]
        words = [np.frombuffer(p, dtype="<i8") for p in of_query]
        # The blinding of a query is the same in all answers to it, so it drops out of their differences.
        self._view.replies.append([total + (w - words[0]) for w in words])
        return total


class _WatchedTransport(DirectTransport):
    """Keeps every answer of the server; may ask twice, as a site does whose first answer comes late."""

    def __init__(
        self, aggregator: Aggregator, site: str, payloads: list[list[bytes]], frames: list[bytes], sends_twice: bool
    ) -> None:
        super().__init__(aggregator, site)
        self._payloads, self._received, self._n_times = payloads, frames, 2 if sends_twice else 1

    def exchange(self, frame: bytes, timeout_s: float) -> bytes:
        answers = [super(_WatchedTransport, self).exchange(frame, timeout_s) for _ in range(self._n_times)]
        self._payloads.append([a.payload[: len(a.payload) - a.tail] for a in map(unpack, answers)])
        self._received += answers
        return next((answer for answer in answers if unpack(answer).type is FrameType.ABORT), answers[0])


def run_attempt(setting: Setting, has_canary: bool, run: int, randomness: list[SiteRandomness]) -> View:
    """Train once and return the adversary's view."""
    attempt = os.urandom(16)
    trusted = setting.plan.trust.is_trusted_aggregator
    on_sum = trusted_server(setting.plan, setting.server_noise(run)) if trusted else None
    folder = None if setting.evidence is None else setting.evidence / attempt.hex()
    server = {} if folder is None else _server_evidence(folder, attempt)
    aggregator = setting.aggregator(SITES, attempt, TIMEOUT_S, on_sum=on_sum, **server)
    pairs = {(i, j): os.urandom(32) for i in range(3) for j in range(i + 1, 3)}
    group, view = os.urandom(32), View(folder=folder)

    def take_part(rank: int) -> None:
        payloads: list[list[bytes]] = []
        frames = view.frames if rank == ADVERSARY else []
        transport = _WatchedTransport(aggregator, SITES[rank], payloads, frames, setting.sends_twice)
        channel = Channel(SITES[rank], SITES, "job", attempt, transport, TIMEOUT_S)
        secrets = {peer: pairs[min(rank, peer), max(rank, peer)] for peer in range(3) if peer != rank}
        make_keys = partial(PairwiseMasks, attempt, rank, secrets, group, blinder=None if trusted else 0)
        keys = make_keys()
        if rank == CANARY_SITE:
            view.make_keys = make_keys
        if folder is not None:
            _keep_evidence(folder, channel)
        masks = _WatchedMasks(keys, view, payloads) if rank == ADVERSARY else MaskedSums(keys)
        part = setting.rows_of(rank, has_canary)
        protected = ProtectedSums(channel, masks, None if trusted else SumTags(attempt, rank, secrets, group))
        sums = NoisySums(protected, setting.plan, setting.pays(run, rank), randomness[rank], len(part.label))
        try:
            train(setting.plan, channel, sums, OwnRows(part.columns, part.label), partial(_end_round, channel))
            if channel.heads is not None:
                channel.gather(Kind.CLOSING, b"")
        except Exception as error:  # wakes the other sites; the future raises it
            aggregator.abort(f"{SITES[rank]}: {error}")
            raise

    for future in [_THREADS.submit(take_part, rank) for rank in range(3)]:
        future.result()
    return view


def _log(folder: Path, name: str, attempt: bytes, role: str) -> EvidenceLog:
    return EvidenceLog(folder / export_name(name), name, "job", attempt.hex(), "dp_trusted", role=role)


def _server_evidence(folder: Path, attempt: bytes) -> dict[str, Callable]:
    log = _log(folder, SERVER, attempt, "server")

    def note(transfer: Transfer) -> None:
        frame = transfer.frame  # whole, as every short one is: its payload is committed to by the log's own rule
        log.record(
            transfer.direction,
            frame.counter,
            frame.kind.name,
            str(frame.moment),
            frame.codec.name,
            frame.n_values,
            frame.payload,
            private=frame.kind.private,
            peers=transfer.sites,
            salt=frame.salt,
        )

    return {"on_transfer": note, "attachment": log.signed_head}


def _keep_evidence(folder: Path, channel: Channel) -> None:
    """Let a channel keep a log and exchange heads when they are due, as ``SiteAttempt`` does."""
    log = _log(folder, channel.site, bytes.fromhex(channel.attempt), "site")

    def take_heads(heads: list[bytes]) -> None:
        log.countersign(dict(zip((*SITES, SERVER), heads, strict=True)), None)

    channel.recorder, channel.heads = log, HeadExchange(log.signed_head, take_heads)


def _end_round(channel: Channel, number: int) -> None:
    if channel.heads is not None:
        channel.recorder.round(number)
        channel.heads.is_due = True


# -- what the adversary makes of it -----------------------------------------------------------------------------------


class KnownSums:
    """Answers every query with the total that came in the run, and keeps what was asked."""

    def __init__(self, totals: Sequence[Integers]) -> None:
        self._totals, self.exact, self.kinds = iter(totals), [], []

    def release(
        self, kind: Kind, number: int, exact: Integers, tree: int | None = None, level: int | None = None
    ) -> Integers:
        self.exact.append(exact.ravel())
        self.kinds.append(kind)
        return next(self._totals).reshape(exact.shape)


def exact_answers(plan: PrivateTreesPlan, part: Part, totals: Sequence[Integers]) -> tuple[list[Integers], list[Kind]]:
    """Return what some rows alone add to each query, in a run that went on with these totals."""
    known = KnownSums(totals)
    # Looked up by name, so that a fault planted in the module is in the sites' training and here alike.
    grower = forest.ForestGrower(plan, OwnRows(part.columns, part.label), known)
    grower.run(lambda number: None, lambda number, trees: None)
    return known.exact, known.kinds


def shape_of(view: View) -> list[tuple]:
    """Return all that the adversary received but payloads, salts and hashes: kinds, sizes, order, lists of heads."""
    shape = []
    for data in view.frames:
        frame = unpack(data)
        heads = unpack_list(frame.attachment, len(SITES) + 1) if frame.attachment else []
        read = map(SignedHead.from_bytes, heads)
        listed = [(len(data), head.site, head.n_records) for data, head in zip(heads, read, strict=True)]
        shape.append((len(data), frame.type, frame.place(), len(frame.payload), listed))
    return shape


def heads_confirm(setting: Setting, view: View, has_canary: bool) -> bool:
    """Test a guess of site 3's rows against the first of its heads: would they have given this very head?

    Beside the rows all that goes into the head is public (``shape_of``) or known to the colluders: the masks and the
    replies. For short the public part is taken from the log itself.
    """
    [first, *_] = (frame for frame in map(unpack, view.frames) if frame.attachment)
    head = SignedHead.from_bytes(unpack_list(first.attachment, len(SITES) + 1)[CANARY_SITE])
    sums, _ = exact_answers(setting.plan, setting.rows_of(CANARY_SITE, has_canary), view.totals)
    digest = GENESIS
    [path] = view.folder.glob(f"{SITES[CANARY_SITE]}*.jsonl.partial")  # a log of this harness is never closed
    for line in path.read_bytes().splitlines()[: head.n_records]:
        body = {key: value for key, value in parse_line(line).items() if key != "hash"}
        if body["type"] == "message" and body["direction"] == "sent" and body["counter"] == 0:
            label = MessageLabel(body["counter"], body["kind"], body["phase"], body["n_values"])
            body["sha256"] = commitment(MaskedSums(view.make_keys()).protect(sums[0], label))
        digest = chain_line(digest, body)[1]
    return digest == head.digest


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one run looked like.

    Args:
        log_ratio: log-likelihood ratio of the world with the canary to the one without, under the noise that is
            claimed to be unknown to the adversary.
        with_own_noise_twice: the same for an adversary who supposes that site 2 has drawn his own noise.
        noise: what was left after the truth was taken away. Shapes: float64[n], in claimed standard deviations.
        mu: Euclidean norm of the canary in claimed standard deviations, over all queries.
        epsilon: where noise is Laplace's, the sum of the canary's parts in claimed parameters of it, over all queries.
    """

    log_ratio: float
    with_own_noise_twice: float
    noise: NDArray[np.float64]
    mu: float
    epsilon: float


def judge(setting: Setting, views: Sequence[View], has_canary: bool) -> Verdict:
    """Compute both pre-registered statistics from all that the adversary saw."""
    plan, ratios, noise, length, largest = setting.plan, np.zeros(2), [], 0.0, 0.0
    log_ratio = _laplace_ratio if plan.method.is_pure else _gaussian_ratio
    others = [setting.rows_of(site, False) for site in range(3) if site != ADVERSARY]
    pooled = Part(np.concatenate([p.columns for p in others], axis=1), np.concatenate([p.label for p in others]))
    seen: set[tuple[int, bytes]] = set()
    for view in views:
        if all((i, reply.tobytes()) in seen for i, of_query in enumerate(view.replies) for reply in of_query):
            continue
        expected, kinds = exact_answers(plan, pooled, view.totals)
        canary, _ = exact_answers(plan, setting.canary, view.totals)
        own = view.own  # without any noise, if the server adds it
        if not plan.trust.is_trusted_aggregator:
            own, _ = exact_answers(plan, setting.rows_of(ADVERSARY, False), view.totals)
        for i, kind in enumerate(kinds):
            scale, std = _unknown_noise(plan, kind, expected[i].size)
            moved = canary[i] / scale
            for reply in view.replies[i]:
                if (i, reply.tobytes()) in seen:
                    continue  # the same answer once more tells nothing
                seen.add((i, reply.tobytes()))
                rest = (reply - view.own[i] - expected[i]) / scale
                twice = rest - (view.own[i] - own[i]) / scale
                ratios += [log_ratio(rest, moved), log_ratio(twice, moved)]
                noise.append((rest - has_canary * moved) * scale / std)
                length += float(np.sum((canary[i] / std) ** 2))
                largest += float(np.abs(moved).sum())
    return Verdict(float(ratios[0]), float(ratios[1]), np.concatenate(noise), float(np.sqrt(length)), largest)


def _gaussian_ratio(rest: NDArray[np.float64], moved: NDArray[np.float64]) -> float:
    return float(moved @ (rest - moved / 2))


def _laplace_ratio(rest: NDArray[np.float64], moved: NDArray[np.float64]) -> float:
    return float((np.abs(rest) - np.abs(rest - moved)).sum())


def _unknown_noise(plan: PrivateTreesPlan, kind: Kind, size: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return accounted parameter and standard deviation of what the adversary does not know. Units: grid steps."""
    planned = next(release.noise for release in plan.releases.releases if release.kind is kind)
    n_honest = plan.trust.n_honest
    if planned.sensitivity.norm is Norm.L1:
        scales = np.array(laplace_scales(planned.sensitivity, 1 / planned.multiplier))
        std = scales * np.sqrt(2)
    else:
        scales = std = np.array(share_scales(planned.sensitivity, planned.multiplier, n_honest)) * np.sqrt(n_honest)
    return np.tile(scales, size // scales.size), np.tile(std, size // scales.size)


def audit(setting: Setting, n_runs: int) -> dict[bool, list[Verdict]]:
    """Run both worlds, with fresh noise each time; even runs without the canary, odd ones with it."""
    verdicts: dict[bool, list[Verdict]] = {False: [], True: []}
    for run in range(2 * n_runs):
        has_canary = bool(run % 2)
        randomness = setting.randomness(run)
        views = [run_attempt(setting, has_canary, run, randomness) for _ in range(setting.n_attempts)]
        verdicts[has_canary].append(judge(setting, views, has_canary))
    return verdicts
