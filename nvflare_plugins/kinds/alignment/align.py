"""One site's part in an alignment: guards, intersection, order, proof, and the file with its positions."""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from he_processors.errors import ConfigurationError, ProtocolError, VeilBoostError
from nvflare_plugins.attempt.job_context import JobResult, SiteContext
from nvflare_plugins.attempt.session import Session, tell_all
from nvflare_plugins.attempt.site_attempt import SiteAttempt, SitePart
from nvflare_plugins.attempt.worker_progress import watched
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.data.declaration import VerticalRules
from nvflare_plugins.data.identity import load_ids
from nvflare_plugins.evidence.format import Content, Protection
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.kinds.alignment.intersection import LEAST_IDS, Lists, intersect
from nvflare_plugins.kinds.alignment.job import Alignment, AlignmentJob, save_alignments
from nvflare_plugins.pages.run_record import ALIGNMENT, DataFacts, ReportSection
from nvflare_plugins.site.memory.alignments import AlignmentRegistry, AlignmentRun
from nvflare_plugins.site.memory.forgetting import Forgetting
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.workers.dask_workers import open_workers
from nvflare_plugins.workers.workers import Workers, in_own_process, work_section

# Alignment of named data sets between all parties of a session: guards, intersection, order, proof.
#
# ids = {name: load_ids(policy.data_set(name)) for name in ("train", "test")}   # local, before anything is sent with
# align(channel, session, ids, policy, progress.say) as found:             # the same call at every party
# save_alignments(folder, job_id, site, sites, list(found.values()))        # once this fails, it has failed features =
# found["train"].take(features)                                      # rows now match at all parties
#
# Nothing derived from an id leaves the site before every party's policy and registry have allowed it.


MAX_IDS = 100_000_000
_MAX_OFFER_BYTES = 1 << 20
_PROGRESS_EVERY_S = 5.0

Say = Callable[[str], None]


@contextmanager
def align(
    channel: Channel,
    session: Session,
    ids: Mapping[str, Sequence[bytes]],
    policy: SitePolicy,
    say: Say = lambda text: None,
    evidence: EvidenceLog | None = None,
    workers: Mapping[str, Workers] | None = None,
    *,
    standing: bool = False,
) -> Iterator[dict[str, Alignment]]:
    """Find the rows that all parties of the session have, data set by data set.

    Privacy: who learns what is said in ``intersection.py``. This site's registry remembers the ids as aligned from the
        moment at which all parties have agreed.

    Args:
        ids: canonical ids (``ids.load_ids``) by the name of the data set; the same names at all parties.
        policy: this site's; its ``vertical`` rules guard the alignment, and every other party's guard it too.
        say: writes a line for a person; nothing that is said holds an id or a number of rows.
        standing: it is for scoring, and may be refreshed where policies consent to that.
        evidence: takes note of what was sent to whom; sizes in it are those of padded blocks.
        workers: of this party, by the name of the data set; they blind sets of at least ``LEAST_IDS`` ids.

    Raises:
        PolicyRefusal: the sets are too unequal, the intersection is too small, or ids were aligned before.
        ProtocolError, AuthenticationError: another party, or the server, did not keep to the protocol.
        WorkerFailure: a worker of this party is lost; as after any failure, all may align again.
        VeilBoostError: some party may be left without the result that others keep; then all may align again.
    """
    if any(len(set(of_set)) != len(of_set) for of_set in ids.values()):
        raise ValueError("ids must be different: take them from load_ids")
    offer = _Offer.of(ids, policy.vertical)
    offers = [_Offer.from_bytes(data) for data in tell_all(channel, session, offer.to_bytes(), "alignment offer")]
    if any(set(other.sizes) != set(ids) for other in offers):
        raise ProtocolError("the parties do not align the same data sets")
    least = max(other.min_intersection for other in offers)
    for name in sorted(ids):
        _check_sizes(name, [other.sizes[name] for other in offers], least, offers)
    registry = AlignmentRegistry.open(policy)
    runs = _reserve_together(channel, session, registry, ids, standing=standing)
    aligner = _Aligner(channel, session, registry, least, say, evidence, workers or {})
    has_result = False
    try:
        yield {name: aligner.run(name, ids[name], [other.sizes[name] for other in offers]) for name in sorted(ids)}
        _hear_that_all_keep_it(channel, session)
        has_result = True
    finally:
        registry.finish(runs, has_result=has_result)


def confirm(channel: Channel, session: Session, alignments: Sequence[Alignment]) -> None:
    """Check that all parties hold results of the same alignments, such as ``load_alignment`` returns.

    Raises:
        ProtocolError: they do not.
    """
    content = json.dumps([(a.data_set, a.n_common, a.proof.hex()) for a in alignments]).encode()
    _compare_keyed(channel, session, "alignments held", content)


@dataclass(frozen=True, slots=True)
class _Aligner:
    """What the alignments of one job share."""

    channel: Channel
    session: Session
    registry: AlignmentRegistry
    least: int
    say: Say
    evidence: EvidenceLog | None
    workers: Mapping[str, Workers]

    def run(self, name: str, ids: Sequence[bytes], sizes: Sequence[int]) -> Alignment:
        """Align one data set. ``sizes`` by rank."""
        channel, session = self.channel, self.session
        self.say(f"aligning {name} between {', '.join(channel.sites)}")
        key = session.hmac("alignment items", name.encode())
        items = [hmac.digest(key, one, "sha256") for one in ids]
        domain = session.hmac("alignment domain", f"{channel.job_id}, {name}".encode())
        ticker = _Ticker(self.say, name, 2 * channel.world)
        lists = Lists(channel, session, f"alignment of {name}", max(sizes), ticker.block_done, self._record)
        workers = self.workers.get(name) if len(ids) >= LEAST_IDS else None
        found = intersect(lists, items, sizes, self.least, domain, workers=workers)
        found.sort(key=lambda place: ids[place])
        ordered = b"".join(len(ids[place]).to_bytes(4, "little") + ids[place] for place in found)
        _compare_keyed(channel, session, f"aligned rows of {name}", ordered)
        self.say(f"{name} is aligned: all parties hold the same rows in the same order")
        proof = session.hmac(f"proof of aligned rows of {name}", ordered)
        return Alignment(name, np.array(found, dtype=np.int64), len(ids), self.registry.fingerprint(ids), proof)

    def _record(self, direction: str, party: str, size_bytes: int) -> None:
        if self.evidence is not None:
            self.evidence.content(direction, party, Content.BLINDED_IDS, Protection.BLINDED, size_bytes)


def _compare_keyed(channel: Channel, session: Session, purpose: str, content: bytes) -> None:
    """Check that all parties hold the same content, by HMACs under the group key that name their sender."""
    mine = session.hmac(f"{purpose}, {channel.rank}", content)
    for rank, proof in enumerate(tell_all(channel, session, mine, purpose)):
        if not hmac.compare_digest(proof, session.hmac(f"{purpose}, {rank}", content)):
            raise ProtocolError(f"{channel.sites[rank]} holds other {purpose} than this site; nothing was written")


def _reserve_together(
    channel: Channel,
    session: Session,
    registry: AlignmentRegistry,
    ids: Mapping[str, Sequence[bytes]],
    *,
    standing: bool = False,
) -> tuple[AlignmentRun, ...]:
    """Go on once every party's registry has allowed the alignment; else nothing has left and nothing is remembered."""
    runs: tuple[AlignmentRun, ...] = ()
    try:
        runs = registry.reserve(ids, channel.job_id, channel.sites, standing=standing)
        tell_all(channel, session, b"", "alignment reserved")
        registry.mark_sent(runs)
    except BaseException:  # whatever ends it, nothing has left
        registry.cancel(runs)
        raise
    return runs


def _hear_that_all_keep_it(channel: Channel, session: Session) -> None:
    """Wait until all parties keep the result: a registry that counted it before would let no other party have one.

    A party that does not hear it counts the alignment as a failed one, and tries again with the others, or is told by
    them to use what it keeps.
    """
    try:
        tell_all(channel, session, b"", "alignment kept")
    except VeilBoostError as error:
        raise type(error)(
            f"{error} (this site keeps the alignment; whether all others do is not known: submit the job again)"
        ) from None


@dataclass(frozen=True, slots=True)
class _Offer:
    """What one party brings: sizes by data set, and its own limits."""

    sizes: Mapping[str, int]
    min_intersection: int
    max_size_ratio: int

    @classmethod
    def of(cls, ids: Mapping[str, Sequence[bytes]], rules: VerticalRules) -> _Offer:
        sizes = {name: len(of_set) for name, of_set in ids.items()}
        return cls(sizes, max(rules.min_intersection, 1), max(rules.max_size_ratio, 1))

    def to_bytes(self) -> bytes:
        return json.dumps([dict(self.sizes), self.min_intersection, self.max_size_ratio], sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> _Offer:
        """Parse a peer's offer. Raises: ProtocolError."""
        try:
            document: Any = json.loads(data) if len(data) <= _MAX_OFFER_BYTES else None
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, list) or len(document) != 3 or not isinstance(document[0], dict):
            raise ProtocolError("a party's offer for the alignment is not of the expected form")
        numbers = [*document[0].values(), *document[1:]]
        if not all(type(number) is int and 1 <= number <= MAX_IDS for number in numbers):
            raise ProtocolError("a party's offer for the alignment holds an unusable number")
        return cls(*document)


def _check_sizes(name: str, sizes: Sequence[int], least: int, offers: Sequence[_Offer]) -> None:
    """Refuse what can only fail, or would let a large set ask a small one for each of its rows, before ids leave."""
    if min(sizes) < least:
        raise PolicyRefusal(
            f"a party's set {name!r} has fewer rows than the parties' policies want in common. Policy key: "
            "vertical.min_intersection. Remedy: bring more rows, or ask all parties to lower it."
        )
    if max(sizes) > min(offer.max_size_ratio for offer in offers) * min(sizes):
        raise PolicyRefusal(
            f"the parties' sets {name!r} differ too much in size: a large set can search a small one for its rows. "
            "Policy key: vertical.max_size_ratio. Remedy: bring sets of like sizes, or ask all parties to raise it."
        )


class _Ticker:
    """Says from time to time how far an alignment is."""

    def __init__(self, say: Say, name: str, n_steps: int) -> None:
        self._say, self._name, self._n_steps = say, name, n_steps
        self._step, self._last = 0, time.monotonic()

    def block_done(self, number: int, of: int) -> None:
        now = time.monotonic()
        if now - self._last >= _PROGRESS_EVERY_S:
            self._last = now
            self._say(f"aligning {self._name}: step {self._step + 1} of {self._n_steps}, block {number} of {of}")
        self._step += number == of


# One site's part in an alignment job, from its policy to the file with its positions.


_PROTECTION = {"ids": "ECDH on ristretto255, commutative blinding", "false_positives": "none but collisions of SHA-256"}
_TITLE = "Private alignment of rows"
_NOTE = (
    "Rows were aligned by private set intersection. All parties know the sizes of all sets and which of their own ids "
    "are common to all; the file with this site's positions holds no ids."
)


def _prepare(job: AlignmentJob, context: SiteContext) -> dict[str, list[bytes]]:
    """Return the ids of each data set. Raises: ConfigurationError, PolicyRefusal; DataRefusal: see ``Forgetting``."""
    if len(context.sites) < 2:
        raise ConfigurationError("an alignment needs at least two sites")
    sets = [context.policy.data_set(name) for name in job.data_sets]
    ids = {spec.name: load_ids(spec) for spec in sets}
    for spec in sets:
        Forgetting(context.policy).refuse(ids[spec.name], spec)
    return ids


def _align(attempt: SiteAttempt, ids: dict[str, list[bytes]]) -> JobResult:
    context = attempt.context
    channel, session, policy = attempt.channel, attempt.session, context.policy
    for name in _small(ids):
        attempt.notes += in_own_process(policy, name, f"aligning fewer than {LEAST_IDS:,} ids")
    with workers_of(policy, ids) as workers, ExitStack() as told:  # before anything is reserved or leaves
        of_clusters = list({id(one): one for one in workers.values()}.values())
        for one in of_clusters:
            attempt.progress = told.enter_context(watched(one, attempt.progress))
        say = attempt.progress.say
        with align(channel, session, ids, policy, say, attempt.evidence, standing=True, workers=workers) as found:
            keyed = attempt.conclude(b"".join(found[name].proof for name in sorted(found)))
            results = list(found.values())
            path = save_alignments(attempt.folder.path, context.job_id, context.site, context.sites, results)
        at_workers = [work_section(one.work) for one in of_clusters]
    attempt.all_have_written()
    attempt.write_record(_TITLE, {}, None, (_section(results), *at_workers), data=_data(attempt, ids))
    return JobResult(keyed.hex(), f"the positions of the common rows are in {path}", {"data_sets": sorted(found)})


def _small(ids: Mapping[str, Collection[bytes]]) -> list[str]:
    return sorted(name for name, of_set in ids.items() if len(of_set) < LEAST_IDS)


@contextmanager
def workers_of(policy: SitePolicy, ids: Mapping[str, Collection[bytes]]) -> Iterator[dict[str, Workers]]:
    """Open the clusters that the policy names for large data sets, each once."""
    found: dict[str, Workers] = {}
    with ExitStack() as open_until_then:
        for name in sorted(set(ids) - set(_small(ids))):
            cluster = policy.cluster_for(name)
            same = [workers for other, workers in found.items() if policy.cluster_for(other) == cluster]
            if cluster is not None:
                found[name] = same[0] if same else open_until_then.enter_context(open_workers(cluster))
        yield found


def _data(attempt: SiteAttempt, ids: dict[str, list[bytes]]) -> tuple[DataFacts, ...]:
    specs = attempt.context.policy.data_sets
    return tuple(DataFacts(name, ALIGNMENT, len(ids[name]), (str(specs[name].id),)) for name in ids)


def _section(found: list[Alignment]) -> ReportSection:
    """Return what the report, which stays at this site, says of the result."""
    rows = tuple((a.data_set, f"{a.n_rows:,}", f"{a.n_common:,}") for a in found)
    return ReportSection("Aligned rows", (_NOTE,), ("data set", "rows here", "rows at all parties"), rows)


align_site = SitePart(_prepare, _align, lambda job: job.data_sets, lambda job, ids: _PROTECTION, uses_cluster=True)
"""Takes part in one attempt of an alignment job.

Privacy: the server learns whether the job succeeded, and see ``intersection.py``; neither sizes nor ids are in the
    result or in what the site says.
"""
