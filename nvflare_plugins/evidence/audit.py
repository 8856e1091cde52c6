"""What evidence shows: facts, who signed them, and what plugins of a site claim."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby, pairwise
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from he_processors.errors import AuthenticationError
from he_processors.sum_tags import N_TAGS
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.evidence.format import PAID_IN, SERVER, Content, Protection, SignedHead, seal_statement
from nvflare_plugins.evidence.reader import Log, Message
from nvflare_plugins.evidence.threat_model import PLUGIN_CODECS
from nvflare_plugins.site.certificates import (
    UNREADABLE,
    check_role,
    check_site_chain,
    fingerprint,
    public_key_bytes,
    verify_signature,
)
from nvflare_plugins.site.profiles import OF_SCHEMES, TAGGED, THREAT_MODELS, Statement, ThreatModel
from nvflare_plugins.wire.envelope import Codec, Kind
from nvflare_plugins.wire.profiles import SCHEME, plugin_of

# What evidence and report say of a plugin's profile: who wrote it, and what it says of itself.
#
# Nobody checks what a plugin claims. Evidence carries the claims of all sites, which must be equal, so that they are
# read without loading the plugin.


_CLAIM = "claims "
RELEASE_FACTS = ("plugin", "distribution", "version")
_TEXTS = ("summary", "server_alone", "one_site", "server_and_one_site", "all_but_one")
_UNSAID = "(the evidence does not say)"
_MOST_CHARS = 2000
_LONGEST_CHARS = 20_000  # of all notes together


def plugin_facts(name: str, distribution: str, version: str, statement: Statement) -> dict[str, str]:
    """Return what a site's evidence records under ``protection``."""
    claims = {_CLAIM + text: getattr(statement, text) for text in _TEXTS}
    notes = "\n".join(note.replace("\n", " ") for note in statement.notes)
    return {"plugin": name, "distribution": distribution, "version": version, **claims, f"{_CLAIM}notes": notes}


def scheme_facts(name: str, distribution: str, version: str, sha256: str, assumption: str) -> dict[str, str]:
    """Return the same of a plugin's scheme of vertical jobs: who learns what follows from the protocol, which is ours.

    Args:
        sha256: of its files, which every site has compared before it loaded them.
        assumption: on what the scheme rests, as its author says.
    """
    release = {"plugin": name, "distribution": distribution, "version": version, "sha256": sha256}
    return {**release, f"{_CLAIM}notes": assumption}


def is_claim(fact: str) -> bool:
    """Tell whether a fact of the evidence is a plugin's own statement."""
    return fact.startswith(_CLAIM)


def names_plugin(profile: str, protection: Mapping[str, object]) -> bool:
    """Tell whether a site's facts say which release the plugin of its profile was."""
    facts = [protection.get(fact) for fact in ("distribution", "version")]
    return protection.get("plugin") == plugin_of(profile) and all(isinstance(fact, str) and fact for fact in facts)


def release_of(protection: Mapping[str, object]) -> str:
    """Return name, distribution and version of a plugin for people."""
    return " ".join(printable(str(protection.get(fact, "?")), 100) for fact in RELEASE_FACTS)


def plugin_protection(logs: Iterable[Log]) -> Mapping[str, object] | None:
    """Return the facts of the plugin that an attempt ran under, as its sites recorded them alike; None without one."""
    for log in logs:
        if log.session is not None and plugin_of(log.profile) is not None:
            facts: Mapping[str, object] = log.session["protection"]
            return facts
    return None


def threat_model(profile: str, protection: Mapping[str, object] | None = None) -> ThreatModel | None:
    """Return what is visible under a profile; of a plugin's, what it claims. None for an unknown profile.

    Args:
        protection: the facts that a site's evidence records, of which a plugin's claims are read.
    """
    if plugin_of(profile) is None:
        return THREAT_MODELS.get(profile)
    stated = {name: (protection or {}).get(_CLAIM + name) for name in (*_TEXTS, "notes")}
    notes = stated.pop("notes")
    texts: dict[str, Any] = {
        name: printable(text, _MOST_CHARS) if isinstance(text, str) and text else _UNSAID
        for name, text in stated.items()
    }
    lines = notes[:_LONGEST_CHARS].splitlines() if isinstance(notes, str) else []
    printed = tuple(printable(line, _MOST_CHARS) for line in lines if line)
    if SCHEME.fullmatch(profile):
        return replace(OF_SCHEMES, profile=profile, notes=printed)
    return ThreatModel(profile=profile, codecs=PLUGIN_CODECS, changed=TAGGED, notes=printed, **texts)


# Check the logs of one job attempt against each other and against the profile they claim.
#
# Each check is one function that yields sentences, one per failure; an attempt is good if none has anything to say. No
# check trusts a word of one log that another party's log could contradict, nor a log's own idea of what is private.


MAX_CLOCK_ERROR = timedelta(days=1)
"""How far the parties' clocks may differ. Certificates are judged at times that the signers state: all of them together
can state any time, one alone cannot."""

_MAX_SENTENCE = 600
_ROUTED = (Kind.CONVERSATION.name, Kind.GROUP_KEY.name)  # each site is answered with what others addressed to it


@dataclass(frozen=True, slots=True)
class Certified:
    """A certificate that is believed: hex SHA-256 of its DER form, and of its public key."""

    fingerprint: str
    public_key: str


_AGREED = ("sites", "signed", "public_keys", "certificates", "parameters_hash")
_PROTOCOL = "protocol"
_SPOKEN = "protocols that the sites speak"  # since 0.14; before, all sites had to run one release
_SPAN = re.compile(r"(.+) ([1-9][0-9]{0,4})-([1-9][0-9]{0,4})")
_GROWN_BY = "trees grown by"
_SITES = "the sites"
_WORD_BITS = "word bits"
FORGETS = "trained again without persons of job"


def grown_fact(*, by_sites: bool) -> dict[str, str]:
    """Return what evidence says of who grew the trees; where the sites did, their XGBoosts may differ."""
    return {_GROWN_BY: _SITES if by_sites else "XGBoost"}


def word_fact(bits: int) -> dict[str, int]:
    """Return what evidence says of the words of histograms; evidence that says nothing is of 64 bits."""
    return {_WORD_BITS: bits}


def protocol_facts(protocol: int, protocols: Mapping[str, tuple[int, int]]) -> dict[str, str | int]:
    """Return what evidence says of the protocol that the sites follow, and of what each of them speaks."""
    return {_PROTOCOL: protocol, _SPOKEN: ", ".join(f"{site} {a}-{b}" for site, (a, b) in sorted(protocols.items()))}


def forgets_fact(job_id: str | None) -> dict[str, str]:
    """Return what evidence says of a job that trains another again without persons."""
    return {} if job_id is None else {FORGETS: job_id}


@dataclass(frozen=True, slots=True)
class Audit:
    """What the checks of one attempt found.

    Attributes:
        signed: every site that opened the session signed, and each signature was checked.
        had_session: some site opened a session; before it nothing private is sent, and nobody can sign.
        times: first and last moment that the sites state, by their own clocks; None without any site's log.
        failures: what is wrong, one sentence each; empty means that the evidence holds.
        notes: what a reader should know although nothing is wrong.
    """

    job_id: str
    attempt: str
    profile: str
    sites: tuple[str, ...]
    completed: bool
    signed: bool
    had_session: bool
    times: tuple[datetime, datetime] | None
    failures: tuple[str, ...]
    notes: tuple[str, ...]
    logs: tuple[Log, ...]


def audit(
    logs: Sequence[Log],
    authority: FlareAuthority,
    now: datetime | None = None,
    excused: Collection[str] = (),
    *,
    ended_early: bool = False,
) -> Audit:
    """Run every check on the logs of one attempt (all sites and the server).

    Args:
        now: the present, unless told.
        excused: sites whose log may be missing if the attempt was not completed.
        ended_early: the attempt ended before any sum, and another one completed the job: any log of it
            may be missing.
    """
    by_name = {log.site: log for log in logs}
    sites = [log for name, log in sorted(by_name.items()) if name != SERVER]
    completed = bool(sites) and all(log.completed for log in logs)
    missing = frozenset() if completed else _expected_sites(logs) - set(by_name)
    gone = missing if ended_early else missing & frozenset(excused)
    failures = list(_parties(logs, gone, ended_early=ended_early))
    failures += _times(logs, datetime.now(UTC) if now is None else now)
    for check in (_same_attempt, _agreement, _in_step, _model):
        failures += check(sites)
    for log in logs:
        checks = (_whole, _privacy, _words, _contents)
        failures += [f"{log.site}: {text}" for check in checks for text in check(log)]
    for log in sites:
        failures += [f"{log.site}: {text}" for text in (*_counters(log), *_head_rhythm(log))]
        failures += _same_contents(log, {name: other for name, other in by_name.items() if name != log.site})
        failures += [f"{log.site}: {text}" for text in _heads(log, by_name, authority)]
        failures += [f"{log.site}: {text}" for text in _seal(log, authority)]
    failures += _certificates(sites, authority)
    if SERVER in by_name:
        failures += _server_counters(by_name[SERVER], sorted(_expected_sites(logs)))
        for log in sites:
            failures += [f"{log.site} and the server: {text}" for text in _against_server(log, by_name[SERVER])]
    sessions = [log.session for log in sites if log.session is not None]
    signed = bool(sessions) and all(session["signed"] for session in sessions)
    stated = [moment for log in sites for moment in log.times.values()]
    first = sites[0] if sites else logs[0]
    return Audit(
        first.job_id,
        first.attempt,
        first.profile,
        tuple(log.site for log in sites),
        completed,
        signed,
        bool(sessions),
        (min(stated), max(stated)) if stated else None,
        tuple(printable(text, _MAX_SENTENCE) for text in failures),
        tuple(printable(text, _MAX_SENTENCE) for text in _notes(logs, gone, ended_early=ended_early)),
        tuple(logs),
    )


def _parties(logs: Sequence[Log], gone: Collection[str], *, ended_early: bool) -> Iterator[str]:
    """One log per party, and a log of every party that any of them names."""
    names = [log.site for log in logs]
    for name in sorted(set(names)):
        if names.count(name) > 1:
            yield f"there are {names.count(name)} different logs of {name}"
    expected = {SERVER} | (_expected_sites(logs) or set(names))  # an attempt may end before any session
    for name in sorted(expected - set(names) - set(gone)):
        yield f"the log of {name} is missing"
    for name in sorted(set(names) - expected):
        yield f"{name} handed in a log but is not a site of this attempt"
    if ended_early:
        return
    if set(names) <= {SERVER}:
        yield "there is no log of any site"
    elif len(expected) < 3 and not any(map(_sent_before, logs)):
        yield "a job has at least two sites; these logs know of one"


def _sent_before(log: Log) -> bool:
    """Whether a site trained alone, on what an earlier job has brought it: no other kind of job has one site."""
    return log.session is not None and PAID_IN in log.session["protection"] and not log.parts


def _expected_sites(logs: Iterable[Log]) -> set[str]:
    return set().union(*(log.session["sites"] for log in logs if log.session is not None))


def _same_attempt(sites: Sequence[Log]) -> Iterator[str]:
    for log in sites[1:]:
        if log.profile != sites[0].profile:
            yield f"{log.site} ran under profile {log.profile}, {sites[0].site} under {sites[0].profile}"
        if log.completed != sites[0].completed:
            yield f"{log.site} and {sites[0].site} disagree on whether the attempt was completed"
        mine, first = ([index for _, index in one.rounds] for one in (log, sites[0]))
        if not (log.completed and sites[0].completed):  # one that was lost knows of no more than it saw
            n_both = min(len(mine), len(first))
            mine, first = mine[:n_both], first[:n_both]
        if mine != first:
            yield f"{log.site} and {sites[0].site} did not record the same rounds"


def _whole(log: Log) -> Iterator[str]:
    if log.unfinished:
        yield "the log was never closed: its end is missing"
    elif log.role == "site" and log.completed and log.session is None:
        yield "the log holds no record of the session"
    elif log.role == "server" and (log.session is not None or log.models):
        yield "the log holds records that only a site writes"
    if plugin_of(log.profile) is not None and log.session is not None:
        if not names_plugin(log.profile, log.session["protection"]):
            yield f"the log does not say which release the plugin of profile {log.profile} was"
    elif threat_model(log.profile) is None:
        yield f"profile {log.profile} is unknown, so that nothing can be said about its messages"


def _agreement(sites: Sequence[Log]) -> Iterator[str]:
    """What all sites must have recorded alike when the session was opened."""
    with_session = [(log.site, log.session) for log in sites if log.session is not None]
    for site, session in with_session[1:]:
        first_site, first = with_session[0]
        for name in _AGREED:
            if session[name] != first[name]:
                yield f"{site} and {first_site} recorded different {name.replace('_', ' ')}"
        by_sites = session["protection"].get(_GROWN_BY) == _SITES
        has_protocols = any(_SPOKEN in one["protection"] for one in (session, first))
        for name in (*(() if has_protocols else ("veilboost",)), *(() if by_sites else ("xgboost",))):
            if session["versions"].get(name) != first["versions"].get(name):
                yield f"{site} and {first_site} ran different versions of {name}"
    yield from _same_protection(with_session)
    yield from _protocols(with_session)


def _protocols(sessions: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """The sites followed the highest protocol that all of them speak, as each of them recorded it."""
    if not any({_PROTOCOL, _SPOKEN} & set(session["protection"]) for _, session in sessions):
        return
    for site, session in sessions:
        stated = [_SPAN.fullmatch(one) for one in str(session["protection"].get(_SPOKEN)).split(", ")]
        spans = {one[1]: (int(one[2]), int(one[3])) for one in stated if one is not None}
        if None in stated or sorted(spans) != sorted(session["sites"]) or len(spans) != len(stated):
            yield f"{site} does not record which protocols each site speaks"
            continue
        least, most = max(span[0] for span in spans.values()), min(span[1] for span in spans.values())
        followed = session["protection"].get(_PROTOCOL)
        if least > most or followed != most:
            yield f"{site} followed protocol {followed}, on which the sites cannot have agreed"


def _same_protection(sessions: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Facts on the scheme follow from the job, never from a site: whoever states one states the same as all others."""
    stated: dict[str, tuple[str, object]] = {}
    for site, session in sessions:
        for name, value in sorted(session["protection"].items()):
            first_site, first = stated.setdefault(name, (site, value))
            if value != first:
                yield f"{site} and {first_site} recorded different protection: {name} is {value} and {first}"


def _times(logs: Sequence[Log], now: datetime) -> Iterator[str]:
    """Clocks agree well enough to judge by them until when a certificate was valid."""
    if len({log.number for log in logs}) > 1:
        yield "the logs give the attempt different numbers"
    for log in logs:
        stated = list(log.times.values())  # in the order of the records
        if any(later < earlier - MAX_CLOCK_ERROR for earlier, later in pairwise(stated)):
            yield f"{log.site}: its times run backwards"
        if any(moment > now + MAX_CLOCK_ERROR for moment in stated):
            yield f"{log.site}: it states a time that lies in the future"
    for name in ("session", "end"):
        moments = [log.times[name] for log in logs if name in log.times and log.role == "site"]
        if moments and max(moments) - min(moments) > MAX_CLOCK_ERROR:
            yield f"the clocks of the sites differ by more than a day at the record of the {name}"


def _certificates(sites: Sequence[Log], authority: FlareAuthority) -> Iterator[str]:
    """The certificate that a signed log brings along is the one that its session was opened with, and its own."""
    signed = [(log, log.session) for log in sites if log.session is not None and log.session["signed"]]
    stated = [log.times["session"] for log, _ in signed]
    moments = sorted({min(stated), max(stated)} if stated else ())
    owners: dict[str, str] = {}
    for log, session in signed:
        try:
            believed = authority.certified(log.site, session["certificate"] or "", moments)
        except AuthenticationError as error:
            yield f"{log.site}: the certificate cannot be believed: {error}"
            continue
        if believed.fingerprint != session["certificates"].get(log.site):
            yield f"{log.site}: the certificate in the log is not the one that the sites verified"
        if owners.setdefault(believed.public_key, log.site) != log.site:
            yield f"{log.site} and {owners[believed.public_key]} signed with one and the same key"


def _privacy(log: Log) -> Iterator[str]:
    """Every private kind travelled under a protection that the profile allows."""
    model = threat_model(log.profile)
    seen: set[tuple[str, str, bool]] = {(m.kind, m.codec, m.private) for m in log.messages}
    for name, codec, private in sorted(seen):
        kind = Kind.__members__.get(name)
        if kind is None:
            yield f"message kind {name!r} is not in the catalogue"
        elif kind.private != private:
            yield f"{name} is recorded as {'private' if private else 'public'}, which it is not"
        elif private and (model is None or codec not in model.codecs):
            yield f"LEAK: private message {name} travelled as {codec}, which profile {log.profile} does not allow"
    for name in sorted({kind for kind, _, _ in log.local} - set(Kind.__members__)):
        yield f"locally answered kind {name!r} is not in the catalogue"


def _words(log: Log) -> Iterator[str]:
    """Yield what is wrong with words: histograms alone may have 32 bits, where the session says so, and then all do."""
    stated = None if log.session is None else log.session["protection"]
    if stated is not None and stated.get(_WORD_BITS, 64) not in (32, 64):
        yield f"the session states words of {stated[_WORD_BITS]} bits, which there are not"
    first = next((f"record {one.n}: {text}" for one in log.messages if (text := _wrong(one, stated))), "")
    if first:
        yield first


_HISTOGRAMS = (Kind.HISTOGRAM.name, Kind.HISTOGRAM_METRIC.name)


def _wrong(message: Message, stated: Mapping[str, Any] | None) -> str:
    """Return what is wrong with the words of a message; "" for nothing. Args: stated: None where no session says so."""
    codec = Codec.__members__.get(message.codec)
    width = 0 if codec is None else 8 * codec.word_bytes
    if message.kind not in _HISTOGRAMS:
        return f"{message.kind} travelled in words of 32 bits, which histograms alone do" if width == 32 else ""
    bits = width if stated is None else stated.get(_WORD_BITS, 64)
    if width not in (0, bits):
        return f"a histogram travelled in words of {width} bits; the session states {bits}"
    if width != 32 and (stated is None or _WORD_BITS not in stated):  # a trusted server answers with fewer words
        return ""
    tail = message.size - width // 8 * message.n_values
    most = 8 * N_TAGS if width == 32 and message.kind == Kind.HISTOGRAM.name else tail
    if width and message.size and (tail % 8 or not 0 <= tail <= most):  # a request for another scale holds nothing
        return f"{message.size} bytes are not the size of {message.n_values} words of {width} bits"
    return ""


def _contents(log: Log) -> Iterator[str]:
    """What sealed messages held was protected from its reader as the profile asks."""
    model = threat_model(log.profile)
    for what, protection in sorted({(part.what, part.protection) for part in log.parts}):
        content = Content.__members__.get(what)
        if content is None or protection not in Protection.__members__:
            yield f"content {what!r} under {protection!r} is not in the catalogue"
        elif content.only is not None and protection != content.only.name:
            yield f"LEAK: {what} was sent as {protection} instead of {content.only.name}"
        elif content.profile not in (None, log.profile):
            yield f"LEAK: {what} was sent in a job of profile {log.profile}, which never sends it"
        elif content.encrypted and (model is None or protection != model.ciphertexts):
            yield f"LEAK: {what} was sent as {protection}, which profile {log.profile} does not allow"


def _same_contents(log: Log, peers: Mapping[str, Log]) -> Iterator[str]:
    """What one party says it sent, the other says it received, in order."""
    for site, other in peers.items():
        sent = [(p.what, p.protection, p.size) for p in log.parts if p.peer == site and p.direction == "sent"]
        got = [(p.what, p.protection, p.size) for p in other.parts if p.peer == log.site and p.direction == "received"]
        if log.completed and other.completed and sent != got:
            yield f"{log.site} and {site} recorded different contents of what {log.site} sent"
    for name in sorted({part.peer for part in log.parts} - set(peers)):
        yield f"{log.site} recorded contents exchanged with {name}, which handed in no log"


def _counters(log: Log) -> Iterator[str]:
    """A site sends and receives in turn, counting exchanges from 0 without a gap."""
    for place, message in enumerate(log.messages):
        direction = "received" if place % 2 else "sent"
        if (message.counter, message.direction) != (place // 2, direction):
            yield (
                f"record {message.n} is message {message.counter} {message.direction} where "
                f"{place // 2} {direction} was due"
            )
            return
        if message.peers != (SERVER,):
            yield f"record {message.n} names another peer than the server"
    if log.completed and len(log.messages) % 2:
        yield "the last message sent was never answered, yet the attempt is recorded as completed"


def _server_counters(server: Log, sites: Sequence[str]) -> Iterator[str]:
    """The server hears every site once per exchange and then answers every site once."""
    if not sites:
        return
    exchanges = [(counter, list(part)) for counter, part in groupby(server.messages, key=lambda m: m.counter)]
    for place, (counter, messages) in enumerate(exchanges):
        heard = sorted(peer for m in messages if m.direction == "received" for peer in m.peers)
        told = sorted(peer for m in messages if m.direction == "sent" for peer in m.peers)
        turns = [direction for direction, _ in groupby(messages, key=lambda m: m.direction)]
        whole = heard == list(sites) and told == heard and turns == ["received", "sent"]
        is_last = place == len(exchanges) - 1 and not server.completed  # some may be lost before they could send
        if counter != place or not (whole or (is_last and not told and _are_some_of(heard, sites))):
            yield f"server: exchange {place} is not one message received from and one sent to every site"
            return


def _are_some_of(names: Sequence[str], sites: Sequence[str]) -> bool:
    return len(set(names)) == len(names) and set(names) <= set(sites)


def _in_step(sites: Sequence[Log]) -> Iterator[str]:
    """At each exchange all sites sent the same kind of message and received the same answer, unless it was routed."""
    for log in sites[1:]:
        for mine, first in zip(log.messages, sites[0].messages, strict=False):
            step, step_of_first = ((one.kind, one.phase, one.codec, one.n_values) for one in (mine, first))
            if step != step_of_first:
                yield f"{log.site} and {sites[0].site} were not in step at exchange {mine.counter} ({mine.kind})"
                break
            if mine.direction == "received" and mine.kind not in _ROUTED and _differ(mine, first):
                yield f"{log.site} and {sites[0].site} received different answers at exchange {mine.counter}"
                break
        if log.completed and sites[0].completed and len(log.messages) != len(sites[0].messages):
            yield f"{log.site} and {sites[0].site} recorded different numbers of messages"


def _against_server(log: Log, server: Log) -> Iterator[str]:
    """What the site sent is what the server received from it, and the other way round."""
    theirs = {
        (m.counter, m.direction): m for m in server.messages if log.site in m.peers
    }  # direction as the server sees it
    for message in log.messages:
        opposite = "received" if message.direction == "sent" else "sent"
        other = theirs.pop((message.counter, opposite), None)
        if other is None:
            if log.completed:
                yield f"exchange {message.counter} ({message.kind}) is missing in the server's log"
                return
        elif _differ(message, other):
            yield f"exchange {message.counter} ({message.kind}) does not have the same content at both ends"
            return
    for counter, direction in sorted(theirs)[: 1 if log.completed else 0]:
        yield f"exchange {counter}, {direction} by the server, is missing in the site's log"


def _differ(one: Message, other: Message) -> bool:
    mine, theirs = one.content(), other.content()
    if mine[-1] is None or theirs[-1] is None:  # a salt that only one of the two knows: sizes must do
        return mine[:-1] != theirs[:-1]
    return mine != theirs


def _head_rhythm(log: Log) -> Iterator[str]:
    """Heads were exchanged after every round, and once more after the final model."""
    if not log.completed or log.session is None:
        return
    places = [n for n, _ in log.heads]
    next_starts = [*(n for n, _ in log.rounds[1:]), len(log.digests)]
    for (n, index), until in zip(log.rounds, next_starts, strict=False):
        if not any(n < place < until for place in places):
            yield f"no heads were exchanged after round {index}"
            return
    if not any(n > model["n"] for model in log.models for n in places):
        yield "the final heads of all sites are missing"


def _heads(log: Log, by_name: Mapping[str, Log], authority: FlareAuthority) -> Iterator[str]:
    """Every head of another party that this log holds is a state of that party's own log, signed where it must be."""
    expected = set(log.session["sites"]) if log.session is not None else set()
    last: dict[str, int] = {}
    for n, heads in log.heads:
        missing = expected - {head.site for head in heads}
        if missing:
            yield f"record {n} lacks the heads of {', '.join(sorted(missing))}"
        for head in heads:
            owner = by_name.get(head.site)
            if owner is None:
                continue  # reported as a missing log already
            if head.n_records > len(owner.digests) or owner.digests[head.n_records - 1] != head.digest:
                yield f"record {n} holds a head of {head.site} that is not in that party's log: one was rewritten"
                return
            if head.n_records <= last.get(head.site, 0):
                yield f"record {n} repeats a head of {head.site}"
            last[head.site] = head.n_records
            final = any(n > model["n"] for model in log.models)
            if final and any(head.n_records <= model["n"] for model in owner.models):
                yield f"the final head of {head.site} does not cover its record of the model"
            yield from _head_signature(n, head, owner, authority)


def _head_signature(n: int, head: SignedHead, owner: Log, authority: FlareAuthority) -> Iterator[str]:
    if owner.session is None or not owner.session["signed"]:
        return
    try:
        if head.signature is None:
            raise AuthenticationError("it is not signed")
        statement = head.statement(owner.job_id, owner.attempt)
        authority.check(owner.session["certificate"] or "", statement, head.signature)
    except AuthenticationError as error:
        yield f"record {n}: the head of {head.site} does not verify: {error}"


def _seal(log: Log, authority: FlareAuthority) -> Iterator[str]:
    if log.seal is None or log.session is None or not log.session["signed"]:
        return
    if log.seal["signature"] is None:
        yield "the last record is not signed, although the session is"
        return
    body = {"type": "seal", "n": log.seal["n"], "signature": None}
    try:
        signature = bytes.fromhex(log.seal["signature"])
        statement = seal_statement(body, log.digest_before(log.seal["n"]))
        authority.check(log.session["certificate"] or "", statement, signature)
    except (ValueError, AuthenticationError) as error:
        yield f"the signature of the last record does not verify: {error}"


def _model(sites: Sequence[Log]) -> Iterator[str]:
    """All sites ended with the same model, byte for byte (by its keyed hash)."""
    for log in sites:
        if log.completed and len(log.models) != 1:
            yield f"{log.site} recorded {len(log.models)} final models instead of one"
        elif log.models and sites[0].models:
            mine, first = log.models[0], sites[0].models[0]
            if (mine["hmac"], mine["size"]) != (first["hmac"], first["size"]):
                yield f"{log.site} and {sites[0].site} ended with different models"


def _notes(logs: Iterable[Log], gone: Iterable[str], *, ended_early: bool) -> Iterator[str]:
    logs = list(logs)
    why = (
        "this attempt ended before any sum" if ended_early else "the attempt that completed the job went on without it"
    )
    for site in sorted(gone):
        yield f"{site} was lost and handed in no log; {why}"
    for log in logs:
        if log.end is not None and log.end["status"] == "aborted":
            yield f"{log.site} recorded an abort: {log.end['reason'] or 'no reason given'}"
    if any(message.salt == "private" for log in logs for message in log.messages):
        yield "messages with private salts were compared by kind and size, not by content"
    for log in logs:
        if log.session is not None:
            facts = {f"{name} {value}" for name, value in log.session["protection"].items() if not is_claim(name)}
            if facts:
                yield f"{log.site}: " + ", ".join(sorted(facts))


# Certificates as ``verify`` needs them: whose they are, who issued them, what they signed.


class FlareAuthority:
    """Believes site certificates that lead to the project's root; without a root, any that names the site as one.

    A certificate must have been valid when the job ran: at the times that the evidence states.

    Security: without ``root`` a forger of all logs can bring certificates of his own. A server's certificate from
        ordinary provisioning differs from a site's in nothing but its name: only ``server_names`` tells it.

    Args:
        root: the project's root, never from the evidence.
        server_names: names of the project's servers, which are never a site's.
    """

    def __init__(self, root: x509.Certificate | None, server_names: Collection[str] = ()) -> None:
        self._root = root
        self._server_names = frozenset(server_names)

    def certified(self, site: str, certificate: str, moments: Sequence[datetime]) -> Certified:
        """Check that a certificate belonged to ``site`` at these moments. Raises: AuthenticationError."""
        leaf, *others = _load(certificate)
        try:
            self._check(leaf, others, site, moments)
            return Certified(fingerprint(leaf).hex(), hashlib.sha256(public_key_bytes(leaf)).hexdigest())
        except UNREADABLE:
            raise AuthenticationError("it is malformed") from None

    def check(self, certificate: str, statement: bytes, signature: bytes) -> None:
        """Check a signature by the certificate's key. Raises: AuthenticationError."""
        verify_signature(_load(certificate)[0], statement, signature)

    def _check(
        self, leaf: x509.Certificate, others: Sequence[x509.Certificate], site: str, moments: Sequence[datetime]
    ) -> None:
        if not moments:
            raise AuthenticationError("it was not said when the job ran")
        for moment in moments:
            if not leaf.not_valid_before_utc <= moment <= leaf.not_valid_after_utc:
                raise AuthenticationError(f"it was not valid on {moment:%Y-%m-%d}, when the job ran")
        if self._root is None:
            check_role(leaf, site, self._server_names)
        else:
            chain = [c.public_bytes(Encoding.DER) for c in (leaf, *others)]
            for moment in moments:
                check_site_chain(chain, site, self._root, self._server_names, moment)


def _load(certificate: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(certificate.encode())
    except UNREADABLE:
        raise AuthenticationError("it is no certificate in PEM form") from None
