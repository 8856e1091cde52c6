"""``veilboost verify``: what evidence, dossiers and decisions show, as a table or as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography import x509

from he_processors.errors import AuthenticationError, ConfigurationError, ProtocolError
from nvflare_plugins.base.formatting import counted, human_bytes, printable, table_lines
from nvflare_plugins.cli.options import ROOT_CERTIFICATE, Options
from nvflare_plugins.dossier.archive import MAX_BYTES, Dossier, open_dossier
from nvflare_plugins.dossier.decision import Decision, broken, check_bound, is_decision, open_decision
from nvflare_plugins.evidence import audit
from nvflare_plugins.evidence.format import EXPORT_SUFFIX, SERVER, Content, Protection, time_text
from nvflare_plugins.evidence.threat_model import protection_text
from nvflare_plugins.evidence.verification import (
    MAX_SENTENCE,
    Verdict,
    Verification,
    contents,
    policies,
    traffic,
    unchecked,
    verify,
)
from nvflare_plugins.site.certificates import UNREADABLE
from nvflare_plugins.wire.envelope import Kind

# ``veilboost verify`` on a dossier: the archive, its signature, and the evidence in it anew.


_SIGNATURE_OF_ZIP = b"PK\x03\x04"
_VERIFICATION = "verification.json"
_EVIDENCE = "evidence/"


def _who_wrote(
    path: Path,
    found: Dossier | Decision,
    root: x509.Certificate | None,
    servers: Collection[str],
    job: str | None,
    *,
    is_signed: bool,
) -> tuple[Verdict, list[str]]:
    """Return who wrote a dossier or a decision, and what stands between a signed one and VERIFIED.

    Raises:
        ProtocolError: it should be signed, or is of another job.
    """
    if root is not None and not is_signed:
        raise ProtocolError(f"{path.name} is not signed by {found.site}, and with a root certificate it must be")
    if job not in (None, found.job_id):
        raise ProtocolError(f"{path.name} is of job {found.job_id}, not of {job}")
    points = [*unchecked(root, servers)]
    return Verdict.UNSIGNED if not is_signed else Verdict.SIGNED if points else Verdict.VERIFIED, points


def is_dossier(path: Path) -> bool:
    """Tell whether a path is that of an archive."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix.lower() == ".zip" or file.read(len(_SIGNATURE_OF_ZIP)) == _SIGNATURE_OF_ZIP


def _evidence(
    dossier: Dossier, root: x509.Certificate | None, servers: Collection[str], at: datetime | None
) -> Verification | None:
    """Check the logs in a dossier, and that they show what it says they do."""
    stated = dossier.members.get(_VERIFICATION)
    if stated is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, content) in enumerate(dossier.members.items()):
            if name.startswith(_EVIDENCE):
                Path(folder, f"{number}{EXPORT_SUFFIX}").write_bytes(content)
        found = verify([Path(folder)], root, servers, dossier.job_id, at)
    try:
        was_sound = bool(json.loads(stated)["sound"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ProtocolError(f"its {_VERIFICATION} cannot be read") from None
    if was_sound and not found.sound:
        why = next(iter([*found.failures, *(text for one in found.attempts for text in one.failures)]), "")
        raise ProtocolError(f"it says that its evidence holds, and that does not: {why or 'the job was not completed'}")
    return found


def _dossier_lines(dossier: Dossier, evidence: Verification | None) -> Iterator[str]:
    yield f"Dossier of job {dossier.job_id} at {dossier.site}, profile {dossier.profile}"
    yield f"  written   {dossier.created:%Y-%m-%d %H:%M:%S} UTC, as the site says"
    yield f"  holds     {len(dossier.members)} files, each as its manifest lists it: {', '.join(dossier.members)}"
    if evidence is None:
        yield "  evidence  not of all parties: it says nothing of what the others recorded"


def _dossier_verdict(dossier: Dossier, verdict: Verdict, points: Sequence[str]) -> str:
    what = f"dossier of job {dossier.job_id} by {dossier.site}"
    if verdict is Verdict.UNSIGNED:
        return f"UNSIGNED: the {what} is whole, but anyone could have written it"
    return f"SIGNED, NOT VERIFIED: the {what} is whole, but {'; '.join(points)}" if points else f"VERIFIED: {what}"


# ``veilboost verify`` on a decision of ``veilboost release``, and on files that it binds.


def _run_on_decision(arguments: Options, root: x509.Certificate | None, servers: Collection[str]) -> int:
    paths = [path for path in arguments.paths if is_decision(path)]
    if len(paths) > 1:
        raise ConfigurationError("name one decision, and beside it files that it binds")
    decision, is_signed = open_decision(paths[0].read_bytes(), audit.FlareAuthority(root, servers))
    verdict, points = _who_wrote(paths[0], decision, root, servers, arguments.job, is_signed=is_signed)
    bound = {path.name: check_bound(decision, path) for path in arguments.paths if path != paths[0]}
    verdict = verdict if decision.released else Verdict.FAILED
    if arguments.json:
        stated = {name: value for name, value in dataclasses.asdict(decision).items() if name != "certificate"}
        told = {"verdict": verdict.name, "exit_code": verdict.value, "unchecked": points, "files": bound}
        print(json.dumps({"decision": told | stated}, indent=2))
    else:
        lines = (*_decision_lines(decision, bound), _decision_verdict(decision, verdict, points))
        print("\n".join(printable(line, MAX_SENTENCE) for line in lines))
    return verdict.value


def _decision_lines(decision: Decision, bound: Mapping[str, str]) -> Iterator[str]:
    yield f"Decision on the model of job {decision.job_id} at {decision.site}, profile {decision.profile}"
    yield f"  made      {decision.time} as the site says, by {decision.by}"
    for name, what in bound.items():
        yield f"  binds     {name}: {what}"
    for one in decision.judged:
        yield f"  {'kept' if one.holds else 'BROKEN':<9} {one.rule}: {one.limit}"
    yield "  It binds this site's copy of the model; the other sites of the job hold the same one."


def _decision_verdict(decision: Decision, verdict: Verdict, points: Sequence[str]) -> str:
    what = f"the release of job {decision.job_id}'s model by {decision.site}"
    if verdict is Verdict.FAILED:
        return f"NOT RELEASED: {decision.site} refused it: {broken(decision.judged)}"
    if verdict is Verdict.UNSIGNED:
        return f"UNSIGNED: anyone could have written {what}"
    return f"SIGNED, NOT VERIFIED: {what}: {'; '.join(points)}" if points else f"VERIFIED: {what}"


# ``veilboost verify``: what evidence shows, as a table that a person can read or as JSON, and the command itself.
#
# What the logs cannot bring along is the root that certificates are checked against: it comes from the caller's own
# startup kit (``--root-ca``), never from the evidence, which a forger would hand over with a root of his own.


_MAX_EVENTS = 8
_MAX_LINES = 200
_MAX_LINE = 2000
_MAX_KIT_BYTES = 1 << 20
_KIT_FILES = ("fed_client.json", "fed_admin.json", "fed_server.json")  # whichever lies beside the root in a startup kit

SHOWS = "It shows: the parties' records agree, message by message, on what left each site and under which protection."
DOES_NOT_SHOW = (
    "It does not show: that inputs were honest, that randomness was good, that the bytes behind a hash were what their "
    "label says, or that nothing left by another way (side channels, timing)."
)


# -- for people -------------------------------------------------------------------------------------------------------


def render(result: Verification) -> str:
    """Return the outcome as text."""
    lines: list[str] = []
    for attempt in result.attempts:
        for part in (_heading, _table, _contents, _spending, _local, _threats):
            lines += [*_bounded(part(attempt)), ""]
        lines += _bounded(f"  note: {text}" for text in attempt.notes)
        lines += _bounded(f"  FAILED: {text}" for text in attempt.failures)
        lines.append("")
    lines += _bounded(f"  note: {text}" for text in result.notes)
    lines += _bounded(f"  FAILED: {text}" for text in result.failures)
    lines += [
        "",
        *((SHOWS, DOES_NOT_SHOW, "") if result.sound and result.verdict is not Verdict.EMPTY else ()),
        verdict_text(result),
    ]
    # Whatever a log says takes one line and steers nothing.
    tidy = [printable(line, _MAX_LINE) for line in lines]
    return "\n".join(line for line, before in zip(tidy, ["", *tidy], strict=False) if line or before)


def said(result: Verification | None) -> list[str]:
    """Return the verdict and what failed, as sentences; nothing where evidence was not asked."""
    if result is None:
        return []
    return [verdict_text(result), *result.failures, *(text for one in result.attempts for text in one.failures)]


def _bounded(lines: Iterable[str]) -> list[str]:
    lines = list(lines)
    more = [f"  ... and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    return lines[:_MAX_LINES] + more


def _heading(attempt: audit.Audit) -> Iterator[str]:
    yield f"Job {attempt.job_id}, attempt {attempt.attempt}, profile {attempt.profile}"
    yield f"  parties   {', '.join(attempt.sites)} and {SERVER}"
    yield f"  attempt   {'completed' if attempt.completed else 'NOT COMPLETED'}"
    if attempt.signed:
        yield "  signed    by every site's certificate"
    elif not attempt.had_session:
        yield "  UNSIGNED  it ended before any site could sign"
    else:
        yield "  UNSIGNED  anyone who holds these files could have written them; only their agreement was checked"
    if attempt.times is not None:
        first, last = (f"{moment:%Y-%m-%d %H:%M:%S}" for moment in attempt.times)
        yield f"  time      {first} to {last} UTC by the sites' own clocks, which is what those who signed it say"
    for site, policy_hash in policies(attempt.logs).items():
        yield f"  policy    {site}: {policy_hash}"
    if attempt.profile == "plain":
        yield "  PROFILE PLAIN: private messages travelled IN CLEAR, as this profile says. Nothing was protected."


def _table(attempt: audit.Audit) -> Iterator[str]:
    rows = [("message", "what", "msgs", "out", "in", "protection and against whom")]
    for item in traffic(attempt.logs):
        known = Kind.__members__.get(item.kind)
        protection = protection_text(attempt.profile, item.kind, item.codec, private=item.private)
        meaning = known.meaning if known is not None else "not in the catalogue"
        sizes = (f"{item.messages}", human_bytes(item.bytes_out), human_bytes(item.bytes_in))
        rows.append((printable(item.kind), meaning, *sizes, protection))
    yield from _ruled(rows)


def _contents(attempt: audit.Audit) -> Iterator[str]:
    rows = [("from", "to", "msgs", "bytes", "", "content inside sealed messages, and its protection from the reader")]
    for item in contents(attempt.logs):
        content = Content.__members__.get(item.what)
        meaning = content.meaning if content is not None else "not in the catalogue"
        known = Protection.__members__.get(item.protection)
        protection = known.value if known is not None else "UNKNOWN"
        size = human_bytes(item.size)
        rows.append((item.sender, item.receiver, f"{item.messages}", size, "", f"{meaning}: {protection}"))
    if len(rows) > 1:
        yield from _ruled(rows)


def _ruled(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from (f"  {line}" for line in table_lines(rows, (2, 3, 4), is_ruled=True))


def _spending(attempt: audit.Audit) -> Iterator[str]:
    """What each party's releases cost, as it recorded them."""
    for log in attempt.logs:
        if log.spends:
            last = log.spends[-1]
            name = printable(log.site)
            releases = counted(len(log.spends), "release")
            yield f"  privacy spent at {name}: epsilon {last.epsilon} at delta {last.delta}, {releases}"
            kinds = Counter(_in_words(spend.event) for spend in log.spends).most_common()
            yield from (f"    {counted(n, 'release')} {printable(words)}" for words, n in kinds[:_MAX_EVENTS])
            if others := sum(n for _, n in kinds[_MAX_EVENTS:]):
                yield f"    and {counted(others, 'release')} of other kinds"


def _in_words(event: str) -> str:
    """Return what a release was, after the number of such: one event, several, or a reply that was paid for before."""
    return event if event.startswith("replayed") else f"of {event.removeprefix('1 x ')}"


def _local(attempt: audit.Audit) -> Iterator[str]:
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for log in attempt.logs:
        for kind, _, how in log.local:
            counts[kind, how] += 1
    if counts:
        yield "  answered without leaving a site:"
        yield from (f"    {kind} x{n}: {printable(how)}" for (kind, how), n in sorted(counts.items()))


def _threats(attempt: audit.Audit) -> Iterator[str]:
    plugin = audit.plugin_protection(attempt.logs)
    model = audit.threat_model(attempt.profile, plugin)
    if model is not None:
        claims = f", as plugin {audit.release_of(plugin)} claims (nobody checked it)" if plugin is not None else ""
        yield f"  who could learn what about another site's rows, beyond the model{claims}:"
        yield from (f"    {who + ':':<26}{what}" for who, what in model.rows())
        yield from (f"    the plugin notes: {note}" for note in model.notes if plugin is not None)


def verdict_text(result: Verification) -> str:
    """Return the verdict in one line."""
    if result.verdict is Verdict.FAILED:
        aborted = not result.failures and not any(attempt.failures for attempt in result.attempts)
        return "NOT VERIFIED: the job was not completed" if aborted and result.attempts else "NOT VERIFIED"
    if result.verdict is Verdict.NOT_FOUND:
        return "NOT FOUND: there is no evidence here. Remedy: name the folder or the files of evidence, or a dossier"
    if result.verdict is Verdict.EMPTY:
        return f"EMPTY: the records of job {result.attempts[0].job_id} show no message and no round, so nothing at all"
    plain = any(attempt.profile == "plain" for attempt in result.attempts)
    plugins = [audit.plugin_protection(attempt.logs) for attempt in result.attempts]
    claims = [
        f"; what protected its sums is the claim of plugin {audit.release_of(plugin)}" for plugin in plugins if plugin
    ]
    nothing = "; profile plain protects nothing" if plain else "".join(claims[:1])
    job = result.attempts[0].job_id
    if result.verdict is Verdict.UNSIGNED:
        return f"UNSIGNED: the records of job {job} agree, but anyone could have written them{nothing}"
    if result.verdict is Verdict.SIGNED:
        return f"SIGNED, NOT VERIFIED: job {job} is consistent, but {'; '.join(result.unchecked)}{nothing}"
    return f"VERIFIED: job {job}{nothing}"


# -- for programs -----------------------------------------------------------------------------------------------------


def to_json(result: Verification, verdict: Verdict | None = None) -> dict[str, Any]:
    """Return the outcome as JSON values. Args: verdict: of what was not checked at all; None takes the outcome's."""
    return {
        "verdict": (verdict or result.verdict).name,
        "exit_code": (verdict or result.verdict).value,
        "verified": result.verified,
        "sound": result.sound,
        "root": result.root,
        "unchecked": list(result.unchecked),
        "failures": list(result.failures),
        "notes": list(result.notes),
        "attempts": [
            {
                "job_id": a.job_id,
                "attempt": a.attempt,
                "profile": a.profile,
                "plugin": _plugin(a),
                "sites": list(a.sites),
                "completed": a.completed,
                "signed": a.signed,
                "times": None if a.times is None else [time_text(moment) for moment in a.times],
                "policies": policies(a.logs),
                "failures": list(a.failures),
                "notes": list(a.notes),
                "messages": [dataclasses.asdict(item) for item in traffic(a.logs)],
                "contents": [dataclasses.asdict(item) for item in contents(a.logs)],
                "spent": {
                    log.site: {"epsilon": log.spends[-1].epsilon, "delta": log.spends[-1].delta}
                    for log in a.logs
                    if log.spends
                },
            }
            for a in result.attempts
        ],
    }


def _plugin(attempt: audit.Audit) -> dict[str, Any] | None:
    """Return which plugin protected the sums of an attempt, and whether anybody but it says so; None without one."""
    facts = audit.plugin_protection(attempt.logs)
    if facts is None:
        return None
    claims = {name: value for name, value in facts.items() if audit.is_claim(name)}
    return {"release": {name: facts[name] for name in audit.RELEASE_FACTS if name in facts}, "claims": claims}


# -- the command ------------------------------------------------------------------------------------------------------


def run(arguments: Options) -> int:
    """Check the evidence, print what it shows, and return the verdict's exit code."""
    verdict = Verdict.FAILED
    try:
        missing = [path for path in arguments.paths if not path.exists()]
        if missing:
            verdict = Verdict.NOT_FOUND
            raise FileNotFoundError(
                f"there is no file or folder {missing[0]}. Remedy: name a folder or files of evidence, or a dossier"
            )
        verdict = Verdict.NO_ROOT
        root, servers = trusted(arguments.root_ca, arguments.paths)
        verdict = Verdict.FAILED
        if any(map(is_decision, arguments.paths)):
            return _run_on_decision(arguments, root, {*servers, *arguments.server})
        if any(map(is_dossier, arguments.paths)):
            return _run_on_dossier(arguments, root, {*servers, *arguments.server})
        result = verify(arguments.paths, root, {*servers, *arguments.server}, arguments.job, arguments.at)
    except (OSError, AuthenticationError, ConfigurationError, ProtocolError) as error:
        text = printable(str(error), MAX_SENTENCE)
        if arguments.json:
            print(json.dumps(to_json(Verification((), (text,)), verdict), indent=2))
        print(f"veilboost verify: {text}", file=sys.stderr)
        return verdict.value
    print(json.dumps(to_json(result), indent=2) if arguments.json else render(result))
    return result.verdict.value


def _run_on_dossier(arguments: Options, root: x509.Certificate | None, servers: Collection[str]) -> int:
    if len(arguments.paths) > 1:
        raise ConfigurationError("a dossier is checked by itself: name nothing else")
    (path,) = arguments.paths
    if path.stat().st_size > MAX_BYTES:
        raise ProtocolError(f"{path.name} has more than {MAX_BYTES} bytes: no dossier has")
    dossier = open_dossier(path.read_bytes(), audit.FlareAuthority(root, servers))
    verdict, points = _who_wrote(path, dossier, root, servers, arguments.job, is_signed=dossier.is_signed)
    inside = _evidence(dossier, root, servers, arguments.at)
    if arguments.json:
        told = {
            "verdict": verdict.name,
            "exit_code": verdict.value,
            **{name: getattr(dossier, name) for name in ("job_id", "attempt", "site", "profile")},
            "created": dossier.created.isoformat(),
            "members": list(dossier.members),
            "unchecked": points,
        }
        print(json.dumps({"dossier": told, "evidence": None if inside is None else to_json(inside)}, indent=2))
    else:
        print("\n".join(_dossier_lines(dossier, inside)))
        if inside is not None:
            print("\nThe evidence in it:\n\n" + render(inside) + "\n")
        print(printable(_dossier_verdict(dossier, verdict, points), MAX_SENTENCE))
    return verdict.value


def trusted(given: Path | None, paths: Sequence[Path]) -> tuple[x509.Certificate | None, frozenset[str]]:
    """Return the root certificate that the caller gave and, from the kit that it lies in, the names of the servers."""
    if given is None:
        return None, frozenset()
    place = given.resolve()
    if any(place.is_relative_to((path if path.is_dir() else path.parent).resolve()) for path in paths):
        raise ConfigurationError(
            f"{given} lies in the folder of the evidence, where whoever wrote the evidence could have put it: give "
            f"the {ROOT_CERTIFICATE} of your own startup kit, or the evidence's own folder alone"
        )
    if not given.is_file():
        raise ConfigurationError(
            f"there is no root certificate {given} (--root-ca): give the {ROOT_CERTIFICATE} of your own startup kit"
        )
    try:
        root = x509.load_pem_x509_certificate(given.read_bytes())
    except UNREADABLE:
        raise ConfigurationError(f"{given} is no certificate in PEM form") from None
    return root, frozenset().union(*(_server_names(place.parent / name) for name in _KIT_FILES))


def _server_names(path: Path) -> frozenset[str]:
    """Return the names of the servers that a file of a startup kit tells."""
    if not path.is_file() or path.stat().st_size > _MAX_KIT_BYTES:
        return frozenset()
    try:
        document = json.loads(path.read_bytes())
        servers = [server.get("identity") or server["name"] for server in document.get("servers", [])]
        servers.append(document.get("admin", {}).get("server_identity"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigurationError(
            f"{path} beside the root certificate cannot be read as part of a startup kit"
        ) from None
    return frozenset(name for name in servers if isinstance(name, str) and name)
