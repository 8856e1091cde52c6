"""Certificates in evidence: the right site, the right root, the right signature; also long after they expired."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from he_processors.errors import AuthenticationError
from nvflare_plugins import verify as verify_module
from nvflare_plugins.certificates import Identity
from nvflare_plugins.evidence_certificates import FlareAuthority
from nvflare_plugins.verify import render, verify
from tests.support import evidence_attempts
from tests.support.evidence_attempts import SITES, Attempt


def name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])


def certificate(subject, key, issuer, issuer_key, *, ca=False, end=None):
    end = end or datetime.now(UTC) + timedelta(days=30)
    builder = (
        x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name(issuer)).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(end - timedelta(days=60)).not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca, None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )  # fmt: skip
    if ca:
        others = dict.fromkeys(
            ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
             "encipher_only", "decipher_only"), False,
        )  # fmt: skip
        builder = builder.add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **others), critical=True)
    else:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(subject)]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


class Project:
    """A root and the sites' identities under it."""

    def __init__(self, end=None):
        root_key = ec.generate_private_key(ec.SECP256R1())
        self.root = certificate("project", root_key, "project", root_key, ca=True, end=end)
        self.identities = {}
        for site in SITES:
            key = ec.generate_private_key(ec.SECP256R1())
            leaf = certificate(site, key, "project", root_key, end=end)
            self.identities[site] = Identity(site, (leaf,), self.root, frozenset(), key)


@pytest.fixture(scope="module")
def project():
    return Project()


def run(folder, project, monkeypatch, **changes):
    """Write signed evidence of one attempt with the project's real certificates."""
    monkeypatch.setattr(evidence_attempts.ToyAuthority, "check", lambda *_: None)
    attempt = Attempt(folder, signed=True)
    identities = project.identities
    prints = {s: i.chain[0].fingerprint(hashes.SHA256()).hex() for s, i in identities.items()}
    attempt.open_session(**{
        site: {
            "certificate": identity.chain_pem.decode(), "certificate_fingerprints": prints, "signer": identity.sign,
            **changes.get(site, {}),
        }
        for site, identity in identities.items()
    })  # fmt: skip
    attempt.round(0)
    return attempt.finish()


def failures(result) -> str:
    return "\n".join(text for attempt in result.attempts for text in attempt.failures)


def test_signed_evidence_is_verified_with_and_without_root(tmp_path, project, monkeypatch):
    run(tmp_path, project, monkeypatch)
    with_root = verify([tmp_path], project.root)
    assert with_root.verified, failures(with_root)
    assert project.root.fingerprint(hashes.SHA256()).hex() in render(with_root) and "UNSIGNED" not in render(with_root)
    without = verify([tmp_path])
    assert without.verified and "no root certificate given" in render(without)


def test_root_beside_the_evidence_is_used(tmp_path, project, monkeypatch, capsys):
    run(tmp_path, project, monkeypatch)
    parser = argparse.ArgumentParser()
    verify_module.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["verify", str(tmp_path)])
    (tmp_path / "rootCA.pem").write_bytes(Project().root.public_bytes(Encoding.PEM))
    assert arguments.func(arguments) == 1
    (tmp_path / "rootCA.pem").write_bytes(project.root.public_bytes(Encoding.PEM))
    assert arguments.func(arguments) == 0
    (tmp_path / "rootCA.pem").write_text("no certificate")
    assert arguments.func(arguments) == 1
    assert "no certificate in PEM form" in capsys.readouterr().err


def test_certificates_of_another_project_are_not_believed(tmp_path, project, monkeypatch):
    run(tmp_path, Project(), monkeypatch)
    result = verify([tmp_path], project.root)
    assert not result.verified and "does not lead to this project's root" in failures(result)


def test_key_that_is_not_the_certificates_is_found(tmp_path, project, monkeypatch):
    run(tmp_path, project, monkeypatch, **{"site-2": {"signer": Project().identities["site-2"].sign}})
    text = failures(verify([tmp_path], project.root))
    assert "the head of site-2 does not verify" in text
    assert "site-2: the signature of the last record does not verify" in text


def test_evidence_outlives_its_certificates(tmp_path, monkeypatch):
    expired = Project(end=datetime.now(UTC) - timedelta(days=400))
    run(tmp_path, expired, monkeypatch)
    assert verify([tmp_path], expired.root).verified


@pytest.mark.parametrize(
    "text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "\ud800"]
)
def test_what_is_no_certificate(project, text):
    for authority in (FlareAuthority(None), FlareAuthority(project.root)):
        with pytest.raises(AuthenticationError):
            authority.fingerprint("site-1", text)
        with pytest.raises(AuthenticationError):
            authority.check(text, b"statement", b"signature")
