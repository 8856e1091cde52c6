"""Which certificates may speak for a site. Certificates come from NVFlare's own functions."""

from __future__ import annotations

import base64
import contextlib
import json
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID
from nvflare.lighter.utils import Identity as Subject
from nvflare.lighter.utils import generate_cert

from he_processors.errors import AuthenticationError, ConfigurationError
from nvflare_plugins.evidence.audit import FlareAuthority
from nvflare_plugins.site.certificates import Identity, check_site_chain, fingerprint, verify_signature
from tests.support.sessions import Authority, key_number

NOW = datetime.now(UTC)
AUTHORITY = Authority()
SERVERS = frozenset({"server1"})


def check(certificate: x509.Certificate, site: str = "site-1", **changes) -> x509.Certificate:
    arguments = {"root": AUTHORITY.root, "server_names": SERVERS, "now": NOW, **changes}
    return check_site_chain([certificate.public_bytes(Encoding.DER)], site, **arguments)


def key_usage(**true) -> x509.KeyUsage:
    names = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{name: true.get(name, False) for name in names})


CLIENT_AND_SERVER = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])


def test_certificates_of_provision_and_of_requests_are_accepted():
    provisioned = AUTHORITY.issue("site-1", 1)
    assert check(provisioned) == provisioned
    requested = AUTHORITY.issue(
        "site-1",
        1,
        role="client",
        extra_extensions=[
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (key_usage(digital_signature=True, key_encipherment=True), True),
            (CLIENT_AND_SERVER, False),
        ],
    )
    assert check(requested) == requested


def refused(certificate: x509.Certificate, match: str, site: str = "site-1", **changes) -> None:
    with pytest.raises(AuthenticationError, match=match):
        check(certificate, site, **changes)


def test_another_sites_certificate():
    refused(AUTHORITY.issue("site-2", 2), "names another party")


def test_server_certificates_are_refused():
    plain_server = AUTHORITY.issue("server1", 3, server_default_host="server1")
    refused(plain_server, "names another party")
    refused(plain_server, "name of a server", site="server1")
    listener = AUTHORITY.issue(
        "site-1", 3, server_default_host="site-1", server_additional_hosts=["localhost", "127.0.0.1"]
    )
    refused(listener, "host names")
    refused(AUTHORITY.issue("site-1", 3, server_default_host="10.0.0.1"), "host names")
    refused(AUTHORITY.issue("site-1", 3, role="server"), "server or an administrator")
    only_server = [(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)]
    refused(AUTHORITY.issue("site-1", 3, extra_extensions=only_server), "not meant for clients")


@pytest.mark.parametrize("role", ["project_admin", "lead", "org_admin", "member", "Client", "relay"])
def test_administrators_are_refused(role):
    refused(AUTHORITY.issue("site-1", 3, role=role), "administrator")


def test_authorities_and_certificates_that_may_not_sign_are_refused():
    refused(AUTHORITY.issue("site-1", 3, ca=True), "authority")
    no_signing = [(key_usage(key_encipherment=True), True)]
    refused(AUTHORITY.issue("site-1", 3, extra_extensions=no_signing), "may not sign")


def test_foreign_roots_are_refused():
    foreign = Authority(101)
    assert foreign.root.subject == AUTHORITY.root.subject
    refused(foreign.issue("site-1", 1), "does not lead")
    self_signed = generate_cert(Subject("site-1"), Subject("site-1"), key_number(1), key_number(1).public_key())
    refused(self_signed, "does not lead")


@pytest.mark.parametrize("days", [(-10, -1), (1, 10)])
def test_expired_and_future_certificates_are_refused(days):
    refused(AUTHORITY.issue("site-1", 1, days=days), "not valid on")


def test_expired_roots_are_refused():
    certificate = AUTHORITY.issue("site-1", 1, days=(-1, 1000))
    refused(certificate, "does not lead", now=NOW + timedelta(days=900))


def test_chains_through_an_intermediate_authority():
    middle = AUTHORITY.issue("middle", 4, ca=True)
    leaf = generate_cert(
        Subject("site-1"),
        Subject("middle", "org"),
        key_number(4),
        key_number(1).public_key(),
        not_valid_before=NOW - timedelta(days=1),
    )
    encoded = [c.public_bytes(Encoding.DER) for c in (leaf, middle)]
    assert check_site_chain(encoded, "site-1", AUTHORITY.root, SERVERS, NOW) == leaf
    with pytest.raises(AuthenticationError, match="does not lead"):
        check_site_chain(encoded[:1], "site-1", AUTHORITY.root, SERVERS, NOW)
    # A site may not act as an authority.
    site = AUTHORITY.issue("site-2", 2)
    child = generate_cert(Subject("site-1"), Subject("site-2", "org"), key_number(2), key_number(1).public_key())
    encoded = [c.public_bytes(Encoding.DER) for c in (child, site)]
    with pytest.raises(AuthenticationError, match="does not lead"):
        check_site_chain(encoded, "site-1", AUTHORITY.root, SERVERS, NOW)


def test_malformed_chains():
    good = AUTHORITY.issue("site-1", 1).public_bytes(Encoding.DER)
    for encoded in ([], [b""], [b"\x30\x82"], [good[:-1]], [good + b"\0"], [good] * 5, [bytes(1 << 15)]):
        with pytest.raises(AuthenticationError):
            check_site_chain(encoded, "site-1", AUTHORITY.root, SERVERS, NOW)


def test_two_common_names():
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, n) for n in ("site-1", "site-2")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(AUTHORITY.root.subject)
    builder = builder.public_key(key_number(1).public_key()).serial_number(5)
    builder = builder.not_valid_before(NOW - timedelta(days=1)).not_valid_after(NOW + timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("site-1")]), False)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(key_number(100).public_key()), False
    )
    with pytest.raises(AuthenticationError, match="malformed"):
        check(builder.sign(key_number(100), hashes.SHA256()))


def test_signatures_verify_for_every_kind_of_key():
    for key in (key_number(1), ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()):
        certificate = generate_cert(Subject("site-1"), Subject("project"), key_number(100), key.public_key())
        identity = Identity("site-1", (certificate,), AUTHORITY.root, SERVERS, key)
        signature = identity.sign(b"statement")
        verify_signature(certificate, b"statement", signature)
        for statement, forged in ((b"Statement", signature), (b"statement", b""), (b"statement", signature[:-1])):
            with pytest.raises(AuthenticationError):
                verify_signature(certificate, statement, forged)


def write_kit(folder, site="site-1", key=1, certificate_key=None, **changes):
    files = {
        "client.crt": AUTHORITY.issue(site, certificate_key or key).public_bytes(Encoding.PEM),
        "client.key": key_number(key).private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()),
        "rootCA.pem": AUTHORITY.root.public_bytes(Encoding.PEM),
        "fed_client.json": json.dumps({"servers": [{"name": "project", "identity": "server1"}]}).encode(),
        **changes,
    }
    for name, content in files.items():
        if content is not None:
            (folder / name).write_bytes(content)
    return folder


def test_startup_kit(tmp_path):
    identity = Identity.load(write_kit(tmp_path))
    assert identity.site == "site-1" and identity.is_signed and identity.server_names == {"server1"}
    assert x509.load_pem_x509_certificates(identity.chain_pem) == list(identity.chain)
    verify_signature(identity.chain[0], b"x", identity.sign(b"x"))
    assert len(fingerprint(identity.chain[0])) == 32


@pytest.mark.parametrize("name", ["client.crt", "client.key", "rootCA.pem", "fed_client.json"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b"-----BEGIN CERTIFICATE-----\nx"])
def test_damaged_startup_kits(tmp_path, name, content):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Identity.load(write_kit(tmp_path, **{name: content}))


def test_key_of_another_certificate(tmp_path):
    with pytest.raises(ConfigurationError, match="belong together"):
        Identity.load(write_kit(tmp_path, key=1, certificate_key=2))


def test_identities_do_not_show_their_key(tmp_path):
    identity = Identity.load(write_kit(tmp_path))
    assert "PrivateKey" not in repr(identity)
    with pytest.raises(ValueError, match="without certificate"):
        Identity.unsigned("site-1").sign(b"x")


def test_a_certificate_of_an_unknown_version_is_refused():
    """The library's InvalidVersion is no ValueError: a peer's hello once ended in a traceback."""
    data = AUTHORITY.issue("site-1", 1).public_bytes(Encoding.DER)
    hostile = data.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x07", 1)
    assert hostile != data
    with pytest.raises(AuthenticationError, match="malformed"):
        check_site_chain([hostile], "site-1", AUTHORITY.root, SERVERS, NOW)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
@pytest.mark.parametrize("flip", [0x01, 0x80])
def test_any_changed_byte_of_a_certificate_ends_in_words(flip):
    data = AUTHORITY.issue("site-1", 1).public_bytes(Encoding.DER)
    without_root = FlareAuthority(None)
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
        text = f"-----BEGIN CERTIFICATE-----\n{base64.encodebytes(changed).decode()}-----END CERTIFICATE-----\n"
        with contextlib.suppress(AuthenticationError):
            check_site_chain([changed], "site-1", AUTHORITY.root, SERVERS, NOW)
        with contextlib.suppress(AuthenticationError):
            without_root.certified("site-1", text, ())
        with contextlib.suppress(AuthenticationError):
            without_root.check(text, b"a", b"b")
