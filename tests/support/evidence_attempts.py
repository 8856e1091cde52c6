"""Evidence of invented job attempts, written with the real log, as three sites and a server would."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from he_processors.errors import AuthenticationError
from nvflare_plugins.cli.main import main
from nvflare_plugins.evidence.audit import Certified
from nvflare_plugins.evidence.format import SERVER, Earlier, canonical, chain_line, export_name, parse_line
from nvflare_plugins.evidence.log import EvidenceLog, utc_now
from nvflare_plugins.evidence.verification import find_evidence, verify_files

SITES = ("site-1", "site-2", "site-3")
CODEC = {"masks": "MASKED", "plain": "PLAIN", "bfv": "BFV", "ckks": "CKKS"}
PUBLIC_KINDS = ("HANDSHAKE", "CLOSING", "HE_PUBLIC")


class ToyAuthority:
    """Certificates and signatures without big numbers: a signature is a hash under the certificate's text."""

    def certified(self, site: str, certificate: str, moments: Sequence[datetime]) -> Certified:
        if not certificate.startswith(f"certificate of {site}"):
            raise AuthenticationError("it names another site")
        digest = hashlib.sha256(certificate.encode()).hexdigest()
        return Certified(digest, digest)

    def check(self, certificate: str, statement: bytes, signature: bytes) -> None:
        if signature != toy_signature(certificate, statement):
            raise AuthenticationError("wrong signature")


def toy_certificate(site: str) -> str:
    return f"certificate of {site}"


def toy_signature(certificate: str, statement: bytes) -> bytes:
    return hashlib.sha256(certificate.encode() + statement).digest()


def no_bend(party: str, peer: str, direction: str, counter: int, fields: dict) -> dict | None:
    """Record what happened."""
    return fields


@dataclass
class Attempt:
    """One attempt under way: ``exchange`` at will, then ``finish``. ``bend`` may change what one party records.

    bend(party, peer, direction, counter, fields) gets the arguments of ``record`` and returns those to use, or None to
    leave the record out.
    """

    folder: Path
    profile: str = "masks"
    signed: bool = False
    job_id: str = "job"
    attempt: str = "a1"
    number: int = 1
    earlier: Mapping[str, Earlier] = field(default_factory=dict)
    sites: tuple[str, ...] = SITES
    bend: Callable[[str, str, str, int, dict], dict | None] = no_bend
    clock: Callable[[str], datetime] = lambda party: utc_now()
    counter: int = 0
    salt: bytes = b"s" * 16
    logs: dict[str, EvidenceLog] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for site in self.sites:
            self.logs[site] = self._log(site, "site")
        self.logs[SERVER] = self._log(SERVER, "server")

    def _log(self, name: str, role: str) -> EvidenceLog:
        path = self.folder / export_name(name)
        return EvidenceLog(
            path,
            name,
            self.job_id,
            self.attempt,
            self.profile,
            role=role,
            number=self.number,
            earlier=self.earlier.get(name),
            clock=lambda: self.clock(name),
        )

    def open_session(self, **changes: dict) -> None:
        self.exchange("HANDSHAKE", "PUBLIC", "setup:0")
        for site in self.sites:
            certificate = toy_certificate(site)
            facts = {
                "sites": self.sites,
                "signed": self.signed,
                "public_key_fingerprints": {s: hashlib.sha256(s.encode()).hexdigest() for s in self.sites},
                "certificate_fingerprints": {
                    s: hashlib.sha256(toy_certificate(s).encode()).hexdigest() for s in self.sites if self.signed
                },
                "parameters_hash": "aa" * 32,
                "policy_hash": hashlib.sha256(site.encode()).hexdigest(),
                "versions": {"xgboost": "3.2.0", "veilboost": "0.1.0"},
                "certificate": certificate if self.signed else None,
                "signer": (lambda statement, c=certificate: toy_signature(c, statement)) if self.signed else None,
            }
            self.logs[site].session(**{**facts, **changes.get(site, {})})

    def exchange(self, kind: str, codec: str | None = None, phase: str = "update:0", n_values: int = 4) -> None:
        codec = codec or CODEC[self.profile]
        fields = {
            "kind": kind,
            "phase": phase,
            "codec": codec,
            "n_values": n_values,
            "private": kind not in PUBLIC_KINDS,
            "salt": self.salt,
        }
        sent = {site: hashlib.sha256(f"{site}{self.counter}".encode()).digest() for site in self.sites}
        reply = hashlib.sha256(f"sum{self.counter}".encode()).digest()
        for site in self.sites:
            self._record(site, SERVER, "sent", {**fields, "payload": sent[site]})
        for site in self.sites:
            self._record(SERVER, site, "received", {**fields, "payload": sent[site]})
        for site in self.sites:
            if self.bend is not no_bend:
                self._record(SERVER, site, "sent", {**fields, "payload": reply})
            self._record(site, SERVER, "received", {**fields, "payload": reply})
        if self.bend is no_bend:  # an equal reply to all is one record, as the server writes it
            self.logs[SERVER].record("sent", counter=self.counter, peers=self.sites, payload=reply, **fields)
        self.counter += 1

    def _record(self, party: str, peer: str, direction: str, fields: dict) -> None:
        fields = self.bend(party, peer, direction, self.counter, {"counter": self.counter, **fields})
        if fields is not None:
            self.logs[party].record(direction, peers=(peer,), **fields)

    def exchange_heads(self) -> None:
        heads = {site: self.logs[site].signed_head() for site in self.sites}
        check = None
        if self.signed:

            def check(site: str, statement: bytes, signature: bytes) -> None:
                ToyAuthority().check(toy_certificate(site), statement, signature)

        for site in self.sites:
            self.logs[site].countersign(heads, check)

    def round(self, index: int) -> None:
        self.exchange("HISTOGRAM", phase=f"update:{index}")
        self.exchange("METRIC", phase=f"evaluate:{index}", n_values=2)
        for site in self.sites:
            self.logs[site].local("ROOT_SUM", f"update:{index}", "from the root histogram")
            self.logs[site].round(index)
        self.exchange_heads()

    def finish(self, hmac: bytes = b"h" * 32) -> Path:
        for site in self.sites:
            self.logs[site].model("model.json", 1234, hmac)
        heads = {site: self.logs[site].signed_head() for site in self.sites}
        self.exchange("CLOSING", "PUBLIC", "finish:0")
        for log in self.logs.values():
            if log.site != SERVER:
                log.countersign(heads, None)
            log.end("completed")
        return self.close()

    def close(self) -> Path:
        for log in self.logs.values():
            log.close()
        return self.folder


def complete_attempt(folder: Path, rounds: int = 2, **options) -> Path:
    """Write the evidence of a good attempt and return its folder."""
    attempt = Attempt(folder, **options)
    attempt.open_session()
    for index in range(rounds):
        attempt.round(index)
    return attempt.finish()


def rewrite(path: Path, change: Callable[[list[dict]], None]) -> None:
    """Change a log's records and renumber and rehash all of them, as a forger without the signing key would."""
    records = [parse_line(line) for line in path.read_bytes().splitlines()]
    change(records)
    previous, lines = bytes(32), []
    for n, record in enumerate(records):
        body = {**{k: v for k, v in record.items() if k != "hash"}, "n": n}
        previous = chain_line(previous, body)[1]
        lines.append(canonical({**body, "hash": previous.hex()}))
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def check(folder):
    return verify_files(find_evidence([folder]), ToyAuthority())


def only_failures(folder) -> str:
    result = check(folder)
    assert not result.sound
    return "\n".join([*result.failures, *(text for attempt in result.attempts for text in attempt.failures)])


def cli(*arguments: str) -> int:
    return main(["verify", *map(str, arguments)])
