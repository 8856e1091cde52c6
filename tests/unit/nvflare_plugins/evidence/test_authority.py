"""Certificates in evidence: the right site, the right root, the right signature; also long after they expired."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from he_processors.errors import AuthenticationError
from nvflare_plugins.cli.main import main
from nvflare_plugins.cli.verify import render
from nvflare_plugins.evidence.audit import FlareAuthority
from nvflare_plugins.evidence.log import utc_now
from nvflare_plugins.evidence.verification import Verdict, verify
from nvflare_plugins.site.certificates import Identity
from tests.support import evidence_attempts
from tests.support.evidence_attempts import SITES, Attempt

SERVERS = ("server1.bank.example",)


def name(common_name: str, role=None) -> x509.Name:
    attributes = [x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)]
    if role is not None:
        attributes.append(x509.NameAttribute(x509.NameOID.UNSTRUCTURED_NAME, role))
    return x509.Name(attributes)


def certificate(subject, key, issuer, issuer_key, *, ca=False, end=None, role=None, names=()):
    end = end or datetime.now(UTC) + timedelta(days=30)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name(subject, role))
        .issuer_name(name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - timedelta(days=60))
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca, None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if ca:
        others = dict.fromkeys(
            (
                "digital_signature",
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
                "encipher_only",
                "decipher_only",
            ),
            False,
        )
        builder = builder.add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **others), critical=True)
    else:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.DNSName(host) for host in names or (subject,)]), critical=False
        )
    return builder.sign(issuer_key, hashes.SHA256())


class Project:
    """A root and the sites' identities under it."""

    def __init__(self, end=None):
        self.root_key = root_key = ec.generate_private_key(ec.SECP256R1())
        self.root = certificate("project", root_key, "project", root_key, ca=True, end=end)
        self.identities = {}
        for site in SITES:
            key = ec.generate_private_key(ec.SECP256R1())
            leaf = certificate(site, key, "project", root_key, end=end)
            self.identities[site] = Identity(site, (leaf,), self.root, frozenset(), key)

    def with_identity(self, identity):
        """The same project with one more party, or another in the place of one."""
        other = copy.copy(self)
        other.identities = {**self.identities, identity.site: identity}
        return other

    def with_party(self, party, key=None, **facts):
        key = key or ec.generate_private_key(ec.SECP256R1())
        leaf = certificate(party, key, "project", self.root_key, **facts)
        return self.with_identity(Identity(party, (leaf,), self.root, frozenset(), key))


@pytest.fixture(scope="module")
def project():
    return Project()


def run(folder, project, monkeypatch, sites=SITES, clock=lambda party: utc_now(), **changes):
    """Write signed evidence of one attempt with the project's real certificates."""
    monkeypatch.setattr(evidence_attempts.ToyAuthority, "check", lambda *_: None)
    attempt = Attempt(folder, signed=True, sites=sites, clock=clock)
    identities = {site: project.identities[site] for site in sites}
    prints = {s: i.chain[0].fingerprint(hashes.SHA256()).hex() for s, i in identities.items()}
    attempt.open_session(
        **{
            site: {
                "certificate": identity.chain_pem.decode(),
                "certificate_fingerprints": prints,
                "signer": identity.sign,
                **changes.get(site, {}),
            }
            for site, identity in identities.items()
        }
    )
    attempt.round(0)
    return attempt.finish()


def failures(result) -> str:
    return "\n".join(text for attempt in result.attempts for text in attempt.failures)


def test_signed_evidence_is_verified_with_root_and_server_names_only(tmp_path, project, monkeypatch):
    run(tmp_path, project, monkeypatch)
    complete = verify([tmp_path], project.root, SERVERS)
    assert complete.verdict is Verdict.VERIFIED, failures(complete)
    text = render(complete)
    assert project.root.fingerprint(hashes.SHA256()).hex() in text and "UNSIGNED" not in text
    assert text.splitlines()[-1] == "VERIFIED: job job" and "by the sites' own clocks" in text
    without = verify([tmp_path])
    assert without.verdict is Verdict.SIGNED and not without.verified
    assert "no root certificate was given" in render(without).splitlines()[-1]
    nameless = verify([tmp_path], project.root)
    assert nameless.verdict is Verdict.SIGNED and "server" in render(nameless).splitlines()[-1]


def cli(*arguments) -> int:
    return main(["verify", *map(str, arguments)])


def kit(folder, project, name="fed_client.json", content=None):
    """A startup kit as far as ``verify`` looks at it."""
    folder.mkdir(exist_ok=True)
    (folder / "rootCA.pem").write_bytes(project.root.public_bytes(Encoding.PEM))
    document = content or {"servers": [{"name": "project", "identity": "server1.bank.example"}]}
    (folder / name).write_text(json.dumps(document))
    return folder / "rootCA.pem"


@pytest.mark.parametrize(
    ("name", "content"),
    [("fed_client.json", None), ("fed_admin.json", {"admin": {"server_identity": "server1.bank.example"}})],
)
def test_the_command_takes_the_servers_names_from_the_kit_of_the_root(
    tmp_path, project, monkeypatch, capsys, name, content
):
    run(tmp_path / "evidence", project, monkeypatch)
    root = kit(tmp_path / "startup", project, name, content)
    assert cli(tmp_path / "evidence", "--root-ca", root, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["verified"], document["verdict"], document["exit_code"]) == (True, "VERIFIED", 0)
    (root.parent / name).unlink()
    assert cli(tmp_path / "evidence", "--root-ca", root) == 3
    assert cli(tmp_path / "evidence", "--root-ca", root, "--server", "server1.bank.example") == 0
    (root.parent / name).write_text("[")
    assert cli(tmp_path / "evidence", "--root-ca", root) == 5
    assert "startup kit" in capsys.readouterr().err


def test_inventions_without_signatures_fail_where_a_root_is_given(tmp_path, project, capsys):
    """Anyone can write them: with a root they once gave exit code 0 and "verified": true."""
    evidence_attempts.complete_attempt(tmp_path / "evidence")
    root = kit(tmp_path / "startup", project)
    assert cli(tmp_path / "evidence", "--root-ca", root, "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["verified"], document["verdict"]) == (False, "FAILED")
    assert "is not signed by its sites" in document["failures"][0]
    assert cli(tmp_path / "evidence") == 2


def test_a_signed_attempt_does_not_cover_an_unsigned_one_of_the_same_job(tmp_path, project, monkeypatch):
    run(tmp_path / "a", project, monkeypatch)
    evidence_attempts.complete_attempt(tmp_path / "b", attempt="a2", number=2)
    assert verify([tmp_path], project.root, SERVERS).verdict is Verdict.FAILED
    assert verify([tmp_path]).verdict is Verdict.UNSIGNED


def test_an_attempt_that_ended_before_any_session_may_be_unsigned(tmp_path, project, monkeypatch):
    run(tmp_path / "a", project, monkeypatch)
    early = Attempt(tmp_path / "b", attempt="a0", number=2)
    for log in early.logs.values():
        log.end("aborted", "site-2 did not come")
    early.close()
    result = verify([tmp_path], project.root, SERVERS)
    assert result.verdict is Verdict.VERIFIED and "ended before any site could sign" in render(result)


def test_the_root_never_comes_from_the_evidence(tmp_path, project, monkeypatch, capsys):
    """A forger hands over his own root with his own certificates."""
    forger = Project()
    run(tmp_path, forger, monkeypatch)
    root = kit(tmp_path, forger)
    assert cli(tmp_path) == 3
    assert cli(tmp_path, "--root-ca", root) == 5
    assert cli(*tmp_path.glob("*.jsonl"), "--root-ca", root) == 5
    assert "lies in the folder of the evidence" in capsys.readouterr().err
    (tmp_path / "no").mkdir()
    (tmp_path / "no" / "rootCA.pem").write_text("no certificate")
    run(tmp_path / "evidence", project, monkeypatch)
    (tmp_path / "link.pem").symlink_to(tmp_path / "evidence" / "rootCA.pem")
    kit(tmp_path / "evidence", forger)
    assert cli(tmp_path / "evidence", "--root-ca", tmp_path / "link.pem") == 5
    assert "lies in the folder of the evidence" in capsys.readouterr().err
    assert cli(tmp_path / "evidence", "--root-ca", tmp_path / "no" / "rootCA.pem") == 5
    assert "no certificate in PEM form" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("party", "role", "names", "words"),
    [
        ("server1.bank.example", None, (), "is the name of a server"),
        ("server2", "server", (), "belongs to a server or an administrator"),
        ("admin@bank.example", "project_admin", (), "belongs to a server or an administrator"),
        ("hosts", None, ("hosts", "other.bank.example"), "lists host names"),
    ],
)
def test_certificates_of_servers_and_administrators_sign_for_no_site(
    tmp_path, project, monkeypatch, party, role, names, words
):
    sites = ("site-1", "site-2", party)
    run(tmp_path, project.with_party(party, role=role, names=names), monkeypatch, sites=sites)
    result = verify([tmp_path], project.root, SERVERS)
    assert result.verdict is Verdict.FAILED and words in failures(result)


def test_a_certificate_does_not_sign_under_another_sites_name(tmp_path, project, monkeypatch):
    own = project.identities["site-1"]
    fake = Identity("site-2", own.chain, own.root, frozenset(), own._private_key)
    run(tmp_path, project.with_identity(fake), monkeypatch)
    assert "names another party" in failures(verify([tmp_path], project.root, SERVERS))


def test_one_key_does_not_sign_for_two_sites(tmp_path, project, monkeypatch):
    shared = project.identities["site-1"]._private_key
    run(tmp_path, project.with_party("site-2", key=shared), monkeypatch)
    assert "signed with one and the same key" in failures(verify([tmp_path], project.root, SERVERS))


def test_a_job_of_one_site_is_none(tmp_path, project, monkeypatch):
    run(tmp_path, project, monkeypatch, sites=("site-1",))
    assert "at least two sites" in failures(verify([tmp_path], project.root, SERVERS))


def test_certificates_of_another_project_are_not_believed(tmp_path, project, monkeypatch):
    run(tmp_path, Project(), monkeypatch)
    result = verify([tmp_path], project.root)
    assert result.verdict is Verdict.FAILED and "does not lead to this project's root" in failures(result)


def test_key_that_is_not_the_certificates_is_found(tmp_path, project, monkeypatch):
    run(tmp_path, project, monkeypatch, **{"site-2": {"signer": Project().identities["site-2"].sign}})
    text = failures(verify([tmp_path], project.root))
    assert "the head of site-2 does not verify" in text
    assert "site-2: the signature of the last record does not verify" in text


def test_evidence_outlives_its_certificates(tmp_path, monkeypatch):
    """They are judged at the run's time, which the sites state together."""
    end = datetime.now(UTC) - timedelta(days=400)
    expired = Project(end=end)
    run(tmp_path, expired, monkeypatch, clock=lambda party: end - timedelta(days=1))
    assert verify([tmp_path], expired.root, SERVERS).verified
    assert verify([tmp_path], expired.root, SERVERS, at=end - timedelta(days=1.5)).verified
    late = verify([tmp_path], expired.root, SERVERS, at=end + timedelta(days=30))
    assert not late.verified and "did not begin at the time given" in render(late)


def test_expired_certificates_sign_nothing_new(tmp_path, monkeypatch):
    """Keys of a site that has left, or was robbed, once gave VERIFIED for ever."""
    expired = Project(end=datetime.now(UTC) - timedelta(days=2))
    run(tmp_path, expired, monkeypatch)
    result = verify([tmp_path], expired.root, SERVERS)
    assert result.verdict is Verdict.FAILED and "it was not valid on" in failures(result)


def test_certificates_were_valid_when_the_job_ran_not_only_later(tmp_path, project, monkeypatch):
    run(tmp_path, project, monkeypatch, clock=lambda party: datetime(2020, 1, 1, tzinfo=UTC))
    assert "it was not valid on 2020-01-01" in failures(verify([tmp_path], project.root, SERVERS))


def test_one_thief_cannot_turn_the_clock_back_alone(tmp_path, project, monkeypatch):
    end = datetime.now(UTC) - timedelta(days=40)
    mixed = project.with_party("site-2", end=end)
    run(tmp_path, mixed, monkeypatch, clock=lambda party: end - timedelta(days=1) if party == "site-2" else utc_now())
    text = failures(verify([tmp_path], project.root, SERVERS))
    assert "clocks of the sites differ by more than a day" in text and "it was not valid on" in text


@pytest.mark.parametrize("days", [3, 4000])
def test_times_in_the_future_are_refused(tmp_path, project, monkeypatch, days):
    run(tmp_path, project, monkeypatch, clock=lambda party: utc_now() + timedelta(days=days))
    assert "lies in the future" in failures(verify([tmp_path], project.root, SERVERS))


def test_the_job_is_pinned(tmp_path, project, monkeypatch, capsys):
    """Good evidence of another job does not pass for that of this one."""
    run(tmp_path / "evidence" / "a", project, monkeypatch)
    root = kit(tmp_path / "startup", project)
    assert cli(tmp_path / "evidence", "--root-ca", root, "--job", "another") == 1
    assert "no evidence of job another, only of job" in capsys.readouterr().out
    assert cli(tmp_path / "evidence", "--root-ca", root, "--job", "job") == 0
    evidence_attempts.complete_attempt(tmp_path / "evidence" / "b", job_id="b")
    assert cli(tmp_path / "evidence", "--root-ca", root) == 1
    assert "evidence of 2 jobs; choose one (--job): b, job" in capsys.readouterr().out
    assert cli(tmp_path / "evidence", "--root-ca", root, "--job", "job") == 0
    assert "other jobs was left aside" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "\ud800"]
)
def test_what_is_no_certificate(project, text):
    for authority in (FlareAuthority(None), FlareAuthority(project.root)):
        with pytest.raises(AuthenticationError):
            authority.certified("site-1", text, ())
        with pytest.raises(AuthenticationError):
            authority.check(text, b"statement", b"signature")
