"""The plan of a vertical training: core-seconds, bytes, memory and noise of each party, with workers or without."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from dp_components.accounting import PrivacyCost, compose
from he_processors.curve.interface import AFFINE_BYTES, COMPRESSED_BYTES, base_point, to_compressed
from he_processors.curve.registry import open_curve
from he_processors.elgamal.encryption import EXACT_FRACTION_BITS, DigitFormat
from he_processors.errors import ConfigurationError
from he_processors.fixed_point import PackingLayout, PairFormat
from he_processors.histogram.planner import BinLayout
from he_processors.histogram.sums import NodeTotal
from he_processors.paillier import generate_paillier_key
from he_processors.randomness import random_uint64
from he_processors.two_party.oblivious_transfer import BitChooser, OffsetOwner, TransferChooser, TransferSender
from he_processors.two_party.split_argmax import NO_SPLIT, ActiveLevel, NodeSums, PassiveLevel
from nvflare_plugins.attempt.plan import (
    BETWEEN_ROWS,
    Advice,
    ExpectedLoss,
    Plan,
    PlanRequest,
    advise,
    process_memory_bytes,
    shown_lines,
    timed,
    warnings,
)
from nvflare_plugins.base.formatting import human_bytes, human_number, human_seconds, table_lines
from nvflare_plugins.data.declaration import MOST_WORKERS
from nvflare_plugins.kinds.vertical.histogram_maker import PairsForm, histogram_maker, require_curve
from nvflare_plugins.kinds.vertical.job import VerticalJob, VerticalProfile, check_vertical_parameters
from nvflare_plugins.kinds.vertical.key_owner import GradientOwner, elgamal_owner, gradient_owner, pair_format
from nvflare_plugins.kinds.vertical.messages import most_slots
from nvflare_plugins.kinds.vertical.noised import NoisePlan, plan_of
from nvflare_plugins.kinds.vertical.sealed import FRACTION_BITS, SealedPlan, new_offset, sealed_plan
from nvflare_plugins.site.profiles import Family, profiles_of
from nvflare_plugins.wire.profiles import plugin_of
from nvflare_plugins.xgb.parameters import ALIASES

# What the preset noised adds to the sums of each passive party, from the job and public numbers alone.


NOISED = (
    "not estimated: it depends on what a passive party's columns add, which no public number says. Of that, noised "
    "sums at epsilon 1 to 10 kept 58 to 73 % on two tables of 24,000 and 39,000 rows, and with 1 % positives nothing"
)
_NAMES_COLUMNS = ("interaction_constraints",)
_SAMPLE_CANDIDATES = 1024


def planned_sums(job: VerticalJob) -> NoisePlan | SealedPlan | None:
    """Return the plan of a job in the preset noised or sealed; None for any other. Raises: ConfigurationError."""
    if not (job.is_noised or job.is_sealed):
        return None
    free = {name: value for name, value in job.params.items() if ALIASES.get(name, name) not in _NAMES_COLUMNS}
    parameters = check_vertical_parameters(free, ["any"], label=job.label)
    return plan_of(job, parameters) or sealed_plan(job, parameters)


def noise_lines(plan: NoisePlan, foreign: Sequence[int], n_rows: int) -> Iterator[str]:
    """Yield the noise in words, beside what a bin holds on average.

    Args:
        foreign: columns of each passive party.
    """
    yield ""
    again = f", {plan.n_repeats} may be paid for a second time after a loss" if plan.n_repeats else ""
    yield (
        f"preset noised, epsilon {plan.epsilon:g} at delta {plan.delta:g} for each passive party: "
        f"{plan.n_trees - plan.n_repeats} trees may use its columns, {plan.depth} levels each{again}; the rounds "
        "before (own_rounds) cost nothing"
    )
    for number, n_features in enumerate(foreign, 1):
        noise, rows = plan.of_party(n_features), n_rows / plan.n_bins
        yield (
            f"passive party {number}: at most {noise.features_per_tree} of {n_features} features a tree, "
            f"{plan.n_bins} bins; noise on a bin's sum of gradients "
            f"{human_number(plan.rows_of_noise(n_features), 4)} rows (standard deviation), where a bin of "
            f"the root holds about {human_number(rows, 4)} rows"
        )
    yield "given the bits of its splits, which are exact, counted and capped, and not in epsilon"


def noise_advice(
    request: PlanRequest, job: VerticalJob, plan: NoisePlan, foreign: Sequence[int], n_rows: int
) -> Advice:
    """Return what helps a passive party to choose; of several, that with most columns.

    Raises:
        ConfigurationError: its budget cannot be looked at.
    """
    n_features = max(foreign)
    cost: PrivacyCost = compose(plan.of_party(n_features).whole)
    rows = n_rows / plan.n_bins
    ratio = plan.rows_of_noise(n_features) / rows
    text = f"the noise on a bin of the root is {human_number(ratio, 2)} times its largest possible sum of gradients"
    return advise(
        request,
        job.data_set,
        cost,
        cost.for_person,
        noise=({"largest_sum_of_mean_root_bin": ratio}, text),
        expected=ExpectedLoss(NOISED),
        warned=warnings(plan.epsilon, plan.delta, n_rows),
        guessed=f"{BETWEEN_ROWS}, the bits of its splits apart",
    )


def noise_figures(plan: NoisePlan, foreign: Sequence[int]) -> dict[str, Any]:
    """Return the noise as JSON values. Units: rows with the largest gradient."""
    parties = [
        {"features_per_tree": plan.of_party(n).features_per_tree, "rows_of_noise": plan.rows_of_noise(n)}
        for n in foreign
    ]
    trees = {"trees": plan.n_trees - plan.n_repeats, "repeated_trees": plan.n_repeats}
    return {"epsilon": plan.epsilon, "delta": plan.delta, **trees, "parties": parties}


# What a vertical training takes where each party has workers of its own: seconds, bytes and memory for each number.
#
# The rows of a party are divided among its workers, and so is the opening of sums. What is not divided: what goes
# through a party's process, the encrypted pairs above all, and what workers send one another: each nearly all of its
# sums.


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
    slots = max(map(workload.slots_of, range(len(workload.foreign))))
    exchanged = workload.built_nodes * slots * rates.partial_bytes  # of one worker's sums, before they are packed
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


# ``veilboost plan`` for vertical training: core-seconds, bytes and memory of each party, before it runs.
#
# Counts are exact for full trees: rows encrypted, ciphertexts added, bins packed and opened. Rates are measured on this
# machine with the same cryptography that a job uses, on a small table.


PLANNED = profiles_of(Family.VERTICAL)
_SAMPLE_ROWS = 4_096
_SAMPLE_FEATURES = 8
_SAMPLE_BINS = 64
_REPEATS = 3
_WORD_BITS = 52  # of a ciphertext in the fastest backend's memory form
_GRADIENT_BYTES = 64  # of a row at the active party: gradients, encoded pairs, node, prediction
_COPIES = 4  # of a block's sums while it is packed and hidden
_HELD_TENTHS = 131  # of a byte for each value, while a passive party loads a table and makes its bins: measured
_PASSED_TENTHS = 17  # beside the bins, where the table is read in passes meanwhile: measured
_OWN_TENTHS = 80  # of a byte for each value of the active party, beside its bins: measured
_OWN_PASSED_TENTHS = 70  # likewise, where the table is read in passes: measured
_OPENED_BYTES = 64  # of a bin at the active party: sums of node and sibling, scores


def plan(request: PlanRequest, job: VerticalJob | None) -> Plan:
    """Return the plan of a job, or of the shape that is given. Raises: ConfigurationError."""
    rows, own = request.shape()
    foreign = request.foreign_features
    if foreign is None:
        raise ConfigurationError("a vertical plan needs --foreign-features, the columns of each passive party")
    shape: dict[str, Any] = {}
    if job is not None:
        if plugin_of(job.profile) is not None:
            raise ConfigurationError(f"what {job.profile} takes is its own: no plan")
        params = {ALIASES.get(name, name): value for name, value in job.params.items()}
        shape = {"bins": params.get("max_bin"), "depth": params.get("max_depth")}
        shape |= {"trees": job.num_rounds, "key_bits": job.key_bits}
        shape |= {"fraction_bits": job.fraction_bits, "point_bytes": job.point_bytes}
        shape["profile"] = job.profile if job.profile in PLANNED else None
        shape["categories"] = lists_of_parties(job, len(foreign))
        shape = {name: value for name, value in shape.items() if value is not None}
    shape |= request.given("bins", "depth", "key_bits", "profile")
    if request.rounds is not None:
        shape["trees"] = request.rounds
    workload = VerticalWorkload(rows, own, foreign, **shape)
    rates, bytes_per_s = measure_ciphers(workload), request.network.site_bytes_per_s
    memory = process_memory_bytes()
    result = estimate_vertical(workload, rates, bytes_per_s, memory)
    figures: dict[str, Any] = {
        "workload": dataclasses.asdict(workload),
        "rates": dataclasses.asdict(rates),
        "estimate": {**dataclasses.asdict(result), "core_s": result.core_s, "wall_s": result.wall_s},
    }
    text = render_vertical(workload, rates, result, bytes_per_s)
    planned = None if job is None else planned_sums(job)
    if job is not None and isinstance(planned, NoisePlan):
        advice = noise_advice(request, job, planned, foreign, rows)
        figures |= {"noise": noise_figures(planned, foreign) | advice.figures}
        text += "\n".join(["", *noise_lines(planned, foreign, rows), shown_lines(advice.shown)])
    if isinstance(planned, SealedPlan):
        costs = measure_sealed(planned, workload)
        figures |= {"sealed": dataclasses.asdict(costs)}
        text += f"\n\n{costs.text()}\n"
    if request.workers is not None:
        shards = estimate_workers(workload, rates, result, memory, request.workers)
        figures |= {"workers": list(map(dataclasses.asdict, shards))}
        text += render_workers(shards)
    return Plan(figures, text)


def lists_of_parties(job: VerticalJob, n_passive: int) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of the lists of each passive party's categorical columns; parties in order of their names."""
    lists = [
        tuple(len(words) for words in columns.values())
        for site, columns in sorted(job.categories.items())
        if site != job.active
    ]
    if len(lists) > n_passive:
        raise ConfigurationError(
            f"{len(lists)} passive parties of the job have categorical columns; give --foreign-features for each, "
            "in order of their names"
        )
    return tuple(lists)


@dataclass(frozen=True, slots=True)
class SealedCosts:
    """What comparing splits under seal adds to a tree: both parties' processor seconds, and bytes of all messages."""

    candidates: int
    active_s: float
    passive_s: float
    bytes: int

    def text(self) -> str:
        """Return it for people."""
        return (
            f"preset sealed: {self.candidates:,} candidates in a full tree, compared by circuits: "
            f"{human_seconds(self.active_s)} more of one core at the active party, {human_seconds(self.passive_s)} at "
            f"the passive one, {human_bytes(self.bytes)} more of messages, and five exchanges a level in place of two"
        )


def measure_sealed(plan: SealedPlan, workload: VerticalWorkload) -> SealedCosts:
    """Compare some made-up candidates of a node in the middle of a tree, as both parties of a job do: a second."""
    n_rows, of_node = workload.rows >> (workload.depth // 2), 1 << FRACTION_BITS
    node = NodeSums(0, of_node * max(n_rows, 1) // 2, max(n_rows, 1))
    shares = random_uint64(4 * _SAMPLE_CANDIDATES).reshape(4, 1, -1)
    ends = [_transfers(), _transfers()]
    active = ActiveLevel(plan.terms, [node], _SAMPLE_CANDIDATES, ends[0][1], ends[1][0])
    passive = PassiveLevel(plan.terms, [node.n_rows], _SAMPLE_CANDIDATES, ends[1][1], ends[0][0])
    may_win, spent, said = np.ones((1, _SAMPLE_CANDIDATES), dtype=bool), [0.0, 0.0], list[bytes]()
    steps: tuple[Callable[[bytes], bytes], ...] = (
        lambda data: active.ask(),
        lambda data: passive.offer(data, shares[0], shares[1], may_win),
        lambda data: active.garble(data, shares[2], shares[3]),
        passive.score,
        lambda data: active.decide(data, [NO_SPLIT]),
    )
    for number, step in enumerate(steps):
        started = time.process_time()
        said.append(step(said[-1] if said else b""))
        spent[number % 2] += time.process_time() - started
    started = time.process_time()
    passive.winners(said[-1])
    spent[1] += time.process_time() - started
    candidates = ((1 << workload.depth) - 1) * 2 * sum(workload.bins_of(0))
    per = candidates / _SAMPLE_CANDIDATES
    return SealedCosts(candidates, spent[0] * per, spent[1] * per, round(sum(map(len, said)) * per))


def _transfers() -> tuple[OffsetOwner, BitChooser]:
    curve, offset = open_curve(), new_offset()
    sender = TransferSender(curve)
    chooser = TransferChooser(curve, sender.offer, offset)
    return OffsetOwner(offset, chooser.keys), BitChooser(sender.key_pairs(chooser.choices))


@dataclass(frozen=True, slots=True)
class VerticalWorkload:
    """The shape of a vertical training.

    Attributes:
        foreign: number of columns of each passive party.
        categories: of the first so many of them, the number of categories of each categorical column.
    """

    rows: int
    own: int
    foreign: tuple[int, ...]
    bins: int = 256
    depth: int = 6
    trees: int = 10
    key_bits: int = 3072
    profile: str = VerticalProfile.PAILLIER.value
    fraction_bits: int = EXACT_FRACTION_BITS
    point_bytes: int = AFFINE_BYTES
    categories: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        least = {"rows": 1, "own": 0, "bins": 2, "depth": 1, "trees": 1, "key_bits": 2048}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigurationError(f"{name} must be at least {low}")
        if self.profile not in PLANNED:
            raise ConfigurationError(
                f"profile {self.profile!r} has no vertical plan; choose one of {', '.join(PLANNED)}"
            )
        if not self.foreign or min(self.foreign) < 1:
            raise ConfigurationError("a vertical plan needs at least one passive party, each with a column or more")
        for number, (lists, features) in enumerate(zip(self.categories, self.foreign, strict=False), 1):
            if len(lists) > features:
                raise ConfigurationError(
                    f"passive party {number} has {len(lists)} categorical columns in the job, and {features} in "
                    "--foreign-features: give each party's in order of their names"
                )

    def bins_of(self, party: int) -> list[int]:
        """Return the bins of each feature of a passive party: a category has one of its own."""
        lists = self.categories[party] if party < len(self.categories) else ()
        return [*lists, *[self.bins] * (self.foreign[party] - len(lists))]

    def slots_of(self, party: int) -> int:
        """Return the bins of all features of a passive party, with one more each for rows without a value."""
        return sum(count + 1 for count in self.bins_of(party))

    @property
    def scheme(self) -> str:
        """What encrypts gradients, for people."""
        if self.profile == VerticalProfile.ELGAMAL.value:
            return f"ElGamal on a curve, {self.fraction_bits} fraction bits, points of {self.point_bytes} bytes"
        return f"Paillier-{self.key_bits}"

    @property
    def built_nodes(self) -> int:
        """Nodes of a full tree whose histograms travel: the root, and one child of each pair but the last level's."""
        return int(1 + sum(2**level // 2 for level in range(1, self.depth)))

    @property
    def built_rows(self) -> float:
        """Rows in these nodes: all of them at the root, and at most half of them at each further level."""
        return self.rows * (1 + 0.5 * (self.depth - 1))


@dataclass(frozen=True, slots=True)
class CipherRates:
    """CPU seconds of one thread of this machine, for each ..."""

    encrypt_s: float  # row, randomiser included
    receive_s: float  # row at a passive party
    add_s: float  # row and feature
    pack_s: float  # bin, re-randomisation included
    open_s: float  # bin at the active party
    pairs_per_ciphertext: int
    ciphertext_bytes: int
    partial_bytes: int  # of a sum between workers
    held_bytes: int | None = None  # of a ciphertext in memory; None for that of big numbers
    compressed_pays_below: float | None = None  # bits per second of a line, under elgamal with points of 64 bytes

    @property
    def in_memory(self) -> int:
        """Bytes of a ciphertext in the fastest backend's memory form."""
        return 8 * math.ceil(8 * self.ciphertext_bytes / _WORD_BITS) if self.held_bytes is None else self.held_bytes


@dataclass(frozen=True, slots=True)
class PassivePlan:
    """One passive party. Units: core-seconds and bytes per tree; bytes of memory.

    Attributes:
        memory: of a party that holds its table; passes_memory: of one that reads it in passes.
    """

    features: int
    receive_s: float
    histogram_s: float
    pack_s: float
    bytes_in: int
    bytes_out: int
    memory: int
    passes_memory: int

    @property
    def core_s(self) -> float:
        """Core-seconds per tree."""
        return self.receive_s + self.histogram_s + self.pack_s


@dataclass(frozen=True, slots=True)
class VerticalEstimate:
    """Units: core-seconds and bytes per tree; bytes of memory, for a table that is held and for one read in passes."""

    encrypt_s: float
    open_s: float
    network_s: float
    active_memory: int
    active_passes_memory: int
    passives: tuple[PassivePlan, ...]

    @property
    def core_s(self) -> float:
        """Core-seconds of all parties, per tree."""
        return self.encrypt_s + self.open_s + sum(p.core_s for p in self.passives)

    @property
    def wall_s(self) -> float:
        """Seconds per tree with one core for each party and nothing overlapped: an upper estimate."""
        return self.encrypt_s + self.open_s + max(p.core_s for p in self.passives) + self.network_s


def estimate_vertical(
    workload: VerticalWorkload, rates: CipherRates, bytes_per_s: float, process_bytes: int
) -> VerticalEstimate:
    """Combine counts and rates. Pure: same arguments, same result."""
    upload = workload.rows * rates.ciphertext_bytes
    parties = range(len(workload.foreign))
    passives = tuple(_passive(workload, party, rates, upload, process_bytes) for party in parties)
    slots = sum(map(workload.slots_of, parties))
    n_bins = workload.built_nodes * slots
    traffic = len(passives) * upload + sum(p.bytes_out for p in passives)
    opened = slots * 2 ** (workload.depth - 1) * _OPENED_BYTES
    cells = workload.rows * workload.own
    bins = cells * (2 if workload.bins <= 256 else 4)  # by row and by column
    beside = process_bytes + workload.rows * _GRADIENT_BYTES + opened + bins
    return VerticalEstimate(
        encrypt_s=workload.rows * rates.encrypt_s,
        open_s=n_bins * rates.open_s,
        network_s=traffic / bytes_per_s,
        active_memory=beside + cells * _OWN_TENTHS // 10,
        active_passes_memory=beside + cells * _OWN_PASSED_TENTHS // 10,
        passives=passives,
    )


def _passive(
    workload: VerticalWorkload, party: int, rates: CipherRates, upload: int, process_bytes: int
) -> PassivePlan:
    features, bins = workload.foreign[party], workload.bins_of(party)
    n_bins = workload.built_nodes * workload.slots_of(party)
    in_memory = rates.in_memory
    widest = most_slots(bins, max(2 ** (workload.depth - 1) // 2, 1))
    bin_bytes = 1 if max(bins) < 256 else 2
    cells, training = workload.rows * features, workload.rows * in_memory + _COPIES * widest * in_memory
    # Bins are made before the first ciphertext comes: the larger of both counts.
    held = max(cells * _HELD_TENTHS // 10, training + cells * (4 + bin_bytes))
    passed = max(cells * (10 * bin_bytes + _PASSED_TENTHS) // 10, training + cells * bin_bytes)
    return PassivePlan(
        features=features,
        receive_s=workload.rows * rates.receive_s,
        histogram_s=workload.built_rows * features * rates.add_s,
        pack_s=n_bins * rates.pack_s,
        bytes_in=upload,
        bytes_out=math.ceil(n_bins / rates.pairs_per_ciphertext) * rates.ciphertext_bytes,
        memory=process_bytes + held,
        passes_memory=process_bytes + passed,
    )


def measure_ciphers(workload: VerticalWorkload) -> CipherRates:
    """Encrypt, add, hide and open a small table with a fresh key, as both parties of a job do: some seconds."""
    rng, n_rows = np.random.default_rng(0), max(workload.rows, _SAMPLE_ROWS)
    facts: dict[str, Any]
    form: DigitFormat | PairFormat
    owner: GradientOwner
    if workload.profile == VerticalProfile.ELGAMAL.value:
        form = DigitFormat.of(workload.fraction_bits, n_rows, point_bytes=workload.point_bytes)
        owner, n_points = elgamal_owner(form), 1 + form.n_messages
        facts = {"pairs_per_ciphertext": 1, "ciphertext_bytes": n_points * form.point_bytes}
        facts |= {"partial_bytes": n_points * AFFINE_BYTES, "held_bytes": 2 * n_points * AFFINE_BYTES}
        if form.point_bytes == AFFINE_BYTES:
            facts["compressed_pays_below"] = _compressed_pays_below()
    else:
        form, key = pair_format(n_rows), generate_paillier_key(workload.key_bits)
        owner, packing = gradient_owner(key, form), PackingLayout.fit(form, key.public_key.plaintext_bits)
        size = 2 * workload.key_bits // 8
        facts = {"pairs_per_ciphertext": packing.pairs_per_plaintext, "ciphertext_bytes": size, "partial_bytes": size}
    g, h = form.encode_pairs(rng.uniform(-0.5, 0.5, _SAMPLE_ROWS), rng.uniform(0, 0.25, _SAMPLE_ROWS))
    layout = BinLayout((_SAMPLE_BINS,) * _SAMPLE_FEATURES)
    codes = rng.integers(0, _SAMPLE_BINS, (_SAMPLE_FEATURES, _SAMPLE_ROWS)).astype(np.uint8)
    node, total = [np.arange(_SAMPLE_ROWS, dtype=np.int32)], NodeTotal.of_rows(g, h)
    spent: dict[str, float] = defaultdict(float)

    @contextmanager
    def timer(stage: str) -> Iterator[None]:
        started = time.process_time()
        yield
        spent[stage] += (time.process_time() - started) / _REPEATS

    setup = owner.setup
    maker = histogram_maker(setup, setup.max_additions, timer=timer, form=PairsForm.of(form))

    def receive() -> None:
        maker.begin_tree(_SAMPLE_ROWS)
        maker.add_gradients(upload)

    upload, encrypt_s = timed(lambda: owner.encrypt(g, h), _REPEATS)
    _, receive_s = timed(receive, _REPEATS)
    reply, _ = timed(lambda: maker.sum_bins(codes, layout, node), _REPEATS)
    _, open_s = timed(lambda: owner.open_sums(reply, layout, [total]), _REPEATS)
    return CipherRates(
        encrypt_s=encrypt_s / _SAMPLE_ROWS,
        receive_s=receive_s / _SAMPLE_ROWS,
        add_s=spent["histogram"] / (_SAMPLE_ROWS * _SAMPLE_FEATURES),
        pack_s=(spent["pack"] + spent["hide"]) / layout.n_slots,
        open_s=open_s / layout.n_slots,
        **facts,
    )


def _compressed_pays_below() -> float:
    """Return the bits per second at which half a point's bytes take as long as the root that replaces them."""
    curve = require_curve()
    points = curve.take(base_point(curve), np.zeros(_SAMPLE_ROWS, dtype=np.int64))
    affine, compressed = curve.to_affine(points), to_compressed(curve, points)
    _, plain_s = timed(lambda: curve.from_affine(affine), _REPEATS)
    _, rooted_s = timed(lambda: curve.from_compressed(compressed), _REPEATS)
    return 8 * (AFFINE_BYTES - COMPRESSED_BYTES) * _SAMPLE_ROWS / max(rooted_s - plain_s, 1e-9)


# -- for people -------------------------------------------------------------------------------------------------------


def render_vertical(
    workload: VerticalWorkload, rates: CipherRates, estimate: VerticalEstimate, bytes_per_s: float
) -> str:
    """Return the plan as text."""
    foreign = " + ".join(map(str, workload.foreign))
    to_passive = sum(p.bytes_in for p in estimate.passives)
    to_active = sum(p.bytes_out for p in estimate.passives)
    table: list[tuple[str, ...]] = [("per tree", "time of one core", "of which", "receives", "sends", "memory")]
    stages = f"encrypt {human_seconds(estimate.encrypt_s)}, open {human_seconds(estimate.open_s)}"
    sizes = map(human_bytes, (to_active, to_passive, estimate.active_memory))
    table.append(("active party", human_seconds(estimate.encrypt_s + estimate.open_s), stages, *sizes))
    for number, p in enumerate(estimate.passives, 1):
        steps = ("receive", p.receive_s), ("histogram", p.histogram_s), ("pack", p.pack_s)
        stages = ", ".join(f"{name} {human_seconds(seconds)}" for name, seconds in steps)
        sizes = map(human_bytes, (p.bytes_in, p.bytes_out, p.memory))
        table.append((f"passive party {number}", human_seconds(p.core_s), stages, *sizes))
    lines = [
        f"{workload.rows:,} rows, {workload.own} own and {foreign} foreign features, {workload.bins} bins; "
        f"{workload.trees} trees of depth {workload.depth}; {workload.scheme}",
        "",
        *table_lines(table),
    ]
    lines += ["", "Memory where a party's policy has its table read in passes (data_sets.<name>.memory):"]
    lines.append(f"  active party     {human_bytes(estimate.active_passes_memory)}")
    for number, p in enumerate(estimate.passives, 1):
        lines.append(f"  passive party {number}  {human_bytes(p.passes_memory)}")
    lines += [
        "",
        f"all parties: {human_seconds(estimate.core_s)} of one core a tree, "
        f"{human_seconds(estimate.core_s * workload.trees)} in all; with one core for each party at most "
        f"{human_seconds(estimate.wall_s)} a tree, of which {human_seconds(estimate.network_s)} network",
    ]
    if rates.compressed_pays_below is not None:
        lines.append(
            "point_bytes 32 would halve the traffic; it is faster on lines below "
            f"{rates.compressed_pays_below / 1e6:,.0f} Mbit/s for each core of the party that reads"
        )
    lines += [
        "",
        "Assumed:",
        *(f"  - {text}" for text in vertical_assumptions(workload, bytes_per_s)),
    ]
    return "\n".join(lines)


def vertical_assumptions(workload: VerticalWorkload, bytes_per_s: float) -> Iterator[str]:
    """Yield what the estimate takes for granted."""
    yield "trees are full, every feature has all its bins, and every level's smaller children hold half of all rows"
    for number, lists in enumerate(workload.categories, 1):
        yield (
            f"passive party {number}, in order of their names, has the job's categorical columns: {len(lists)} with "
            f"{sum(lists)} categories in all"
        )
    yield "one thread computes like one thread of this machine, measured just now; stages overlap in a real run"
    yield f"all parties' messages together pass a line of {bytes_per_s / 125_000:g} Mbit/s"
    yield "not in it: XGBoost's time, split evaluation, start of FLARE's processes, reading data, alignment"
    yield (
        "the preset `exact`: guarded parties keep sums to themselves and so cost less; noised ones send the sums "
        "of both children of a node, of fewer features and bins (noised_features, noised_bins)"
    )
