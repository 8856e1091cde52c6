"""What left this site, and under which protection: a hash-chained record of one job attempt.

One ``EvidenceLog`` lives at every site and one at the server. The order of calls over a job attempt:

    log = EvidenceLog(path, site, job_id, attempt, profile)
    log.session(...)                            once keys are agreed; gives the log its signer
    log.record("sent", ...) / ("received", ...) every message, before it leaves and after it arrived
    log.transfer(...)                           the same of a frame
    log.content(...)                            what a sealed message to a single party held
    log.spend(...)                              a noised release and the privacy spent with it
    log.local(...)                              a message of XGBoost that was answered without network
    log.round(r)                                at the end of each round: durable from here on; then
        mine = log.signed_head()                  ... exchanged with all sites ...
        log.countersign(heads, verify)
    log.model("model.json", size, hmac)         then the final heads, signed and countersigned as above
    log.end("completed")                        only now, or log.end("aborted", reason) at any time
    log.close() -> path of the finished file

``abandon(reason)`` in place of the last two ends a log whatever happens, also on a full disk: some room is set aside
for that when the log is opened. Until ``close`` the file is called ``<path>.partial``: a finished name means a finished
log. The file holds hashes, sizes, names and public fingerprints only.

Who sees evidence? The server has all logs, whoever downloads the job's result too, and every site gets the heads of all
logs during the job, which hash each record. So a hash that can be tested against guesses tells a site what it never
received. Payloads that someone could guess are therefore committed to with a salt (``UNSALTED_CODECS`` argues which are
not). Sender and receiver must commit to the same bytes, so the sender draws the salt and it travels in the frame: they
both have the payload anyway, and no one else learns the salt. What a record of a message, and a head over it, tell
everyone else is then kind, phase, size and order, which the job itself fixes, and a hash of uniform bytes. A site keeps
its salts in a private file beside the log (mode 0600) which is never exported; the server, whose folder is the job's
result, keeps none.

What a log can show is the agreement of what the parties recorded. It cannot show that inputs were honest, that
randomness was good, or that nothing left by another way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from weakref import WeakValueDictionary

from he_processors.errors import AuthenticationError, ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.base.errors import DISK_IS_FULL, reason_of
from nvflare_plugins.base.files import sync_folder
from nvflare_plugins.evidence.format import (
    CLEAR_CODECS,
    FORMAT,
    GENESIS,
    SALTS_SUFFIX,
    SERVER,
    Content,
    Earlier,
    Lines,
    Protection,
    Record,
    SignedHead,
    canonical,
    chain_line,
    is_name,
    seal_statement,
    set_room_aside,
    time_text,
)
from nvflare_plugins.wire.envelope import SALT_BYTES, UNSALTED_CODECS, Commitment, Transfer, commitment

Signer = Callable[[bytes], bytes]
HeadVerifier = Callable[[str, bytes, bytes], None]
"""Checks (site, statement, signature) against that site's certificate; raises AuthenticationError."""

_MAX_REASON = 500
_LOCK_S = 2.0
_open: WeakValueDictionary[Path, EvidenceLog] = WeakValueDictionary()
_LAST = ("end", "seal")
_BUFFER_BYTES = 1 << 16
_RESERVE_BYTES = 1 << 18  # what waits in the buffer, and the last records
_log = logging.getLogger(__name__)


def utc_now() -> datetime:
    """Return the time by this machine's clock."""
    return datetime.now(UTC)


class EvidenceLog:
    """The hash-chained log of one party over one job attempt. Safe to call from several threads.

    Security: whoever holds the site's certificate key can write any log; without signatures (simulator) anyone who
        holds the file can rewrite it, and only the copies of its heads at the other sites speak against that.
    Privacy: the exported file holds no payload and no hash of one that could be found by trying.
    """

    def __init__(  # noqa: PLR0913 - what its first record holds, and how it is written
        self,
        path: Path,
        site: str,
        job_id: str,
        attempt: str,
        profile: str,
        signer: Signer | None = None,
        *,
        role: str = "site",
        number: int = 1,
        earlier: Earlier | None = None,
        randomness: RandomSource = OS_RANDOMNESS,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        """Open the log and write its first record.

        Args:
            path: the finished file's name, best ``folder / export_name(site)``.
            site: who writes; ``SERVER`` with role "server".
            signer: signs with this party's certificate key; may also be given later to ``session``.
            role: "site" or "server".
            number: of the attempt in its job, from 1.
            earlier: this party's log of the attempt before (``ended.earlier_log``); None if it has none.
            clock: tells the time that the log states at its opening, its session and its end.

        Raises:
            ValueError: a name that evidence cannot hold, an unknown role, or an attempt before the first.
            FileExistsError: this attempt already has a log; evidence is never overwritten.
        """
        if not all(map(is_name, (site, job_id, attempt, profile))):
            raise ValueError("site, job, attempt and profile must be short printable names")
        if role not in ("site", "server"):
            raise ValueError("the role of an evidence log is 'site' or 'server'")
        if number < 1 or (number == 1 and earlier is not None):
            raise ValueError("attempts are numbered from 1, and none is before the first")
        if path.exists():
            raise FileExistsError(f"evidence of this attempt exists already: {path.name}")
        self.path = path
        self.site, self.job_id, self.attempt, self.profile = site, job_id, attempt, profile
        self._role = role
        self._partial = path.with_name(path.name + ".partial")
        self._salts_path = path.with_name(site + SALTS_SUFFIX)
        self._reserve = path.with_name(path.name + ".reserve")
        self._file: Lines | None = Lines(self._partial, 0o644)
        self._salts: Lines | None = None
        set_room_aside(self._reserve, _RESERVE_BYTES)
        self._lock = threading.RLock()
        self._signer = signer
        self._head = GENESIS
        self._n_records = 0
        self._ended = self._sealed = self._is_named = False
        self._randomness = randomness
        self._clock = clock
        self._last_commitment: tuple[bytes | None, bytes, str] = (None, b"", "")
        self._own_head: SignedHead | None = None
        self._peer_heads: dict[str, SignedHead] = {}
        _open[path] = self
        opening: Record = {"type": "open", "format": FORMAT, "role": role, "site": site, "job_id": job_id}
        before = (None, None) if earlier is None else (earlier.attempt, earlier.digest)
        link = {"number": number, "earlier_attempt": before[0], "earlier_digest": before[1]}
        self._append({**opening, "attempt": attempt, "profile": profile, **link, "time": time_text(clock())})

    def session(  # noqa: PLR0913 - the fields of the record, by name
        self,
        *,
        sites: Sequence[str],
        signed: bool,
        public_key_fingerprints: Mapping[str, str],
        certificate_fingerprints: Mapping[str, str],
        parameters_hash: str,
        policy_hash: str,
        versions: Mapping[str, str],
        certificate: str | None = None,
        protection: Mapping[str, str | int] | None = None,
        signer: Signer | None = None,
    ) -> None:
        """Record with whom and on what terms this attempt runs.

        Args:
            public_key_fingerprints, certificate_fingerprints: hex SHA-256 per site (certificates: empty if unsigned).
            certificate: this site's certificate chain in PEM form (public), with which ``verify`` checks signatures.
            protection: facts on the scheme, such as key bits, that verify and report print.

        Raises:
            ValueError: a signed session without signer or certificate.
        """
        with self._lock:
            self._signer = signer if signer is not None else self._signer
            if signed and (self._signer is None or certificate is None):
                raise ValueError("a signed session needs a signer and this site's certificate")
            self._append(
                {
                    "type": "session",
                    "sites": list(sites),
                    "signed": signed,
                    "public_keys": dict(public_key_fingerprints),
                    "certificates": dict(certificate_fingerprints),
                    "certificate": certificate,
                    "parameters_hash": parameters_hash,
                    "policy_hash": policy_hash,
                    "versions": dict(versions),
                    "protection": dict(protection or {}),
                    "time": time_text(self._clock()),
                }
            )
            self.flush()

    def record(  # noqa: PLR0913 - the fields of the record
        self,
        direction: str,
        counter: int,
        kind: str,
        phase: str,
        codec: str,
        n_values: int,
        payload: bytes | Commitment,
        *,
        private: bool,
        peers: Sequence[str] = (SERVER,),
        salt: bytes = b"",
    ) -> None:
        """Record one message. Call with "sent" before the bytes leave.

        Args:
            direction: "sent" or "received".
            counter: the channel's number of this exchange.
            payload: the payload as it stands in the frame (sealed, masked, encrypted or clear), or its commitment
                under the frame's salt.
            private: whether the catalogue calls this kind private.
            peers: with whom; the server names one site per message received, and all receivers of an equal reply.
            salt: the salt that travelled in the frame, where the codec has one. Without it the log draws a salt of its
                own, and the hash cannot be compared with that of the other end.

        Raises:
            ProtocolError: a private kind in clear under any profile but ``plain``; nothing is recorded and the caller
                must not send.
            ValueError: an unknown direction.
        """
        if direction not in ("sent", "received"):
            raise ValueError("direction must be 'sent' or 'received'")
        if private and codec in CLEAR_CODECS and self.profile != "plain":
            raise ProtocolError(f"refused to let private message {kind} pass in clear under profile {self.profile}")
        salt_used, salt_from = self._choose_salt(codec, salt)
        body: Record = {
            "type": "message",
            "direction": direction,
            "counter": counter,
            "kind": kind,
            "phase": phase,
            "codec": codec,
            "private": private,
            "n_values": n_values,
            "size": len(payload),
            "sha256": self._commit(payload, salt_used),
            "salt": salt_from,
            "peers": list(peers),
        }
        with self._lock:
            n = self._append(body)
            if salt_used and self._role != "server":
                self._keep_salt(n, salt_used)

    def transfer(self, transfer: Transfer) -> None:
        """Record a frame, as ``record``."""
        frame = transfer.frame
        self.record(
            transfer.direction,
            frame.counter,
            frame.kind.name,
            str(frame.moment),
            frame.codec.name,
            frame.n_values,
            transfer.commitment,
            private=frame.kind.private,
            peers=transfer.sites,
            salt=frame.salt,
        )

    def content(self, direction: str, peer: str, what: Content, protection: Protection, size_bytes: int) -> None:
        """Record what a sealed message held: with whom, what, and how it was protected from the party that read it.

        Call with "sent" before the bytes leave.

        Raises:
            ProtocolError: content without the protection that it needs, such as gradients without a scheme under any
                profile but ``plain``; the caller must not send.
        """
        if direction not in ("sent", "received"):
            raise ValueError("direction must be 'sent' or 'received'")
        in_clear = what.encrypted and protection is Protection.CLEAR and self.profile != "plain"
        if in_clear or what.only not in (None, protection) or what.profile not in (None, self.profile):
            raise ProtocolError(f"refused to let {what.name} pass as {protection.name} under profile {self.profile}")
        self._append(
            {
                "type": "content",
                "direction": direction,
                "peer": peer,
                "what": what.name,
                "protection": protection.name,
                "size": size_bytes,
            }
        )

    def spend(self, query: str, event: str, epsilon: float, delta: float) -> None:
        """Record a privacy-relevant release of this party and what all of the job's releases so far cost together.

        Args:
            query: what was released, in words free of data.
            event: the mechanism with its parameters.
            epsilon: of this job's releases up to and including this one, at ``delta``.
        """
        self._append(
            {"type": "spend", "query": query, "event": event, "epsilon": f"{epsilon:.9g}", "delta": f"{delta:.9g}"}
        )

    def local(self, kind: str, phase: str, how: str) -> None:
        """Record a message of XGBoost that was answered at this site, so that nothing left; ``how`` says from what."""
        self._append({"type": "local", "kind": kind, "phase": phase, "how": how})

    def round(self, index: int) -> None:
        """Mark the end of a boosting round; everything up to here survives a crash."""
        with self._lock:
            self._append({"type": "round", "round": index})
            self.flush()

    def model(self, name: str, size_bytes: int, hmac: bytes) -> None:
        """Record the finished model by its HMAC under the group key, which the server cannot test guesses against."""
        self._append({"type": "model", "name": name, "size": size_bytes, "hmac": hmac.hex()})

    def signed_head(self) -> bytes:
        """Return this log's present state, signed where the session is, to be exchanged with all sites."""
        with self._lock:
            head = SignedHead(self.site, self._n_records, self._head)
            if self._signer is not None:
                signature = self._signer(head.statement(self.job_id, self.attempt))
                head = SignedHead(head.site, head.n_records, head.digest, signature)
            self._own_head = head
            self.flush()  # others keep it: a process that dies must not leave a log without what it covers
            return head.to_bytes()

    def countersign(self, heads: Mapping[str, bytes], verify: HeadVerifier | None) -> None:
        """Check the heads of all sites and take them into this log, whose own next signature then covers them.

        Args:
            heads: signed head per site as received, this site's own included; the server's under ``SERVER`` if it
                keeps a log. The server's may be unsigned, the sites' not.
            verify: checks a signature against the named site's certificate; None only in an unsigned session.

        Raises:
            ProtocolError: a malformed head, one that goes back, or an own head that is not the one sent.
            AuthenticationError: a signature is missing in a signed session, or does not verify.
        """
        with self._lock:
            read = {site: SignedHead.from_bytes(data) for site, data in sorted(heads.items())}
            for site, head in read.items():
                self._check_head(site, head, verify)
            self._peer_heads.update(read)
            self._append({"type": "heads", "heads": [head.to_dict() for head in read.values()]})

    def end(self, status: str, reason: str = "") -> None:
        """Record how the attempt ended: "completed", or "aborted" with a data-free reason. Later calls do nothing."""
        if status not in ("completed", "aborted"):
            raise ValueError("an attempt ends 'completed' or 'aborted'")
        with self._lock:
            if not self._ended:
                body = {"type": "end", "status": status, "reason": reason[:_MAX_REASON]}
                self._append({**body, "time": time_text(self._clock())})
                self._ended = True
                self.flush_last()

    def flush(self) -> None:
        """Bring everything recorded so far to the disk."""
        with self._lock:
            for file in (self._salts, self._file):
                if file is not None:
                    file.sync()

    def close(self) -> Path:
        """Seal the log with a last, signed record and give the file its finished name. Returns its path.

        A log closed without ``end`` says that it was aborted. After an OSError it may be closed again.
        """
        with self._lock:
            if self._file is not None:
                self.end("aborted", "the log was closed before the attempt had ended")
                self._seal()
                self.flush_last()
                self.let_go()
            if self._sealed and not self._is_named:
                if self._partial.exists():  # else the disk refused no name the last time, but its sync
                    os.replace(self._partial, self.path)
                sync_folder(self.path.parent)
                self._is_named = True
            return self.path

    def _seal(self) -> None:
        """Append the last record, once: a log whose disk refused it may be closed again."""
        if self._sealed:
            return
        body: Record = {"type": "seal", "n": self._n_records, "signature": None}
        if self._signer is not None:
            body["signature"] = self._signer(seal_statement(body, self._head)).hex()
        self._append(body)
        self._sealed = True

    def end_from_outside(self, reason: str, wait_s: float = _LOCK_S) -> None:
        """End and close the log in place of threads that may never return; give up if one is still writing to it."""
        if self._lock.acquire(timeout=wait_s):
            try:
                self.abandon(reason)
            finally:
                self._lock.release()

    def abandon(self, reason: str) -> None:
        """Record that the attempt was aborted, and close; what prevents even that goes to the site's log."""
        with self._lock:
            try:
                self.end("aborted", reason)
                self.close()
            except (OSError, MemoryError) as error:
                _log.error("the evidence of this attempt has no end: %s", reason_of(error))
                self.let_go()

    def flush_last(self) -> None:
        """Bring the last records to the disk, if need be into the room that was set aside for them."""
        try:
            self.flush()
        except OSError as error:
            if error.errno not in DISK_IS_FULL:
                raise
            self._reserve.unlink(missing_ok=True)
            self.flush()

    def let_go(self) -> None:
        """Close the file as it is, without an end."""
        for file in (self._file, self._salts):
            if file is not None:
                file.close()
        self._file = self._salts = None
        with contextlib.suppress(OSError):
            self._reserve.unlink(missing_ok=True)

    def _append(self, body: Record) -> int:
        with self._lock:
            if self._file is None:
                raise ValueError("the evidence log is closed")
            n = self._n_records
            body = {**body, "n": n}
            line, head = chain_line(self._head, body)
            self._file.add(line + b"\n")
            self._head, self._n_records = head, n + 1
            if body["type"] not in _LAST:  # those go to the disk by themselves, into the room set aside
                self._file.drain(_BUFFER_BYTES)
            return n

    def _choose_salt(self, codec: str, salt: bytes) -> tuple[bytes, str | None]:
        if codec in UNSALTED_CODECS:
            return b"", None
        if not salt:
            return self._randomness.bytes(SALT_BYTES), "private"
        if len(salt) != SALT_BYTES:
            raise ValueError(f"a salt has {SALT_BYTES} bytes")
        return salt, "frame"

    def _commit(self, payload: bytes | Commitment, salt: bytes) -> str:
        if isinstance(payload, Commitment):
            if payload.salt != salt:
                raise ValueError("the commitment is under another salt")
            return payload.hexdigest()
        # The server records one and the same reply once per site: hash it once.
        last_payload, last_salt, digest = self._last_commitment
        if payload is last_payload and salt == last_salt:
            return digest
        digest = commitment(payload, salt)
        self._last_commitment = (payload, salt, digest)
        return digest

    def _keep_salt(self, n: int, salt: bytes) -> None:
        if self._salts is None:
            self._salts = Lines(self._salts_path, 0o600)
        self._salts.add(canonical({"n": n, "salt": salt.hex()}) + b"\n")
        self._salts.drain(_BUFFER_BYTES)

    def _check_head(self, site: str, head: SignedHead, verify: HeadVerifier | None) -> None:
        if head.site != site:
            raise ProtocolError(f"the evidence head of {site} names another site")
        if site == self.site and self._own_head != head:
            raise ProtocolError("the evidence head that came back is not the one this site sent")
        before = self._peer_heads.get(site)
        if before is not None and head.n_records <= before.n_records:
            raise ProtocolError(f"the evidence head of {site} does not go forward")
        if verify is None or (site == SERVER and head.signature is None):
            return
        if head.signature is None:
            raise AuthenticationError(f"the evidence head of {site} is not signed")
        verify(site, head.statement(self.job_id, self.attempt), head.signature)


def end_abandoned(path: Path, reason: str) -> None:
    """End and close this process's log of that name, if it is open: the thread that kept it does not return."""
    log = _open.get(path)
    if log is not None:
        log.end_from_outside(reason)
