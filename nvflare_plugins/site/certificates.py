"""Certificates of FLARE startup kits: whose they are, whether they may speak for a site, and signatures with them.

What can be told from a certificate that FLARE 2.9 issues (nvflare/lighter/impl/cert.py, nvflare/tool/cert):

* ``nvflare provision`` gives sites and the server certificates of one form: common name, organisation, the name again
  as the only alternative name; no key usage, no role. An administrator's has his role as "unstructured name". A server
  reachable under further host names, and the listener certificate of a site, list those as alternative names.
* Certificates from signing requests (``nvflare cert``) carry "client", "server" or a role as unstructured name.

So a server's certificate is refused when its role or its host names show it, and always by its common name: a site
certificate must name the site whose turn it is, and the server's own name (``identity`` in the startup kit's
fed_client.json) is never accepted as a site's. What no check can see is a project administrator who issues himself a
second certificate in a site's name: with ordinary provisioning he generates all keys anyway. Pinned fingerprints in the
site's policy close that gap.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from cryptography.x509.verification import VerificationError

from he_processors.errors import AuthenticationError, ConfigurationError

_SITE_ROLE = "client"
_MAX_CHAIN = 4
_MAX_CERTIFICATE_BYTES = 1 << 14
_PSS = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)

UNREADABLE = (
    KeyError,  # cryptography 45.0, of a kind of text that it does not know
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
    x509.AttributeNotFound,
)
"""What the cryptography library raises for certificates that it cannot make sense of."""

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
_Extension = TypeVar("_Extension", bound=x509.ExtensionType)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a site shows and signs with.

    Security: holds the site's private key in memory; it is read from the startup kit and never copied, shown or sent.

    Attributes:
        site: the site's name; the common name of its certificate.
        chain: its certificate and intermediate ones, leaf first; empty for a site without (the simulator).
        root: the project's root, which all peers' chains must lead to.
        server_names: names of the federation's servers, which are never a site's.
    """

    site: str
    chain: tuple[x509.Certificate, ...] = ()
    root: x509.Certificate | None = None
    server_names: frozenset[str] = frozenset()
    _private_key: PrivateKey | None = field(default=None, repr=False, compare=False)

    @classmethod
    def load(cls, startup: Path) -> Identity:
        """Read client.crt, client.key, rootCA.pem and fed_client.json of a startup kit.

        Raises:
            ConfigurationError: a file is missing or malformed, or key and certificate do not belong together.
        """
        try:
            chain = tuple(x509.load_pem_x509_certificates((startup / "client.crt").read_bytes()))
            root = x509.load_pem_x509_certificate((startup / "rootCA.pem").read_bytes())
            key = serialization.load_pem_private_key((startup / "client.key").read_bytes(), password=None)
            servers = json.loads((startup / "fed_client.json").read_text())["servers"]
            server_names = frozenset(str(server.get("identity") or server["name"]) for server in servers)
            site = _common_name(chain[0])
        except (OSError, KeyError, AttributeError, IndexError, RecursionError, *UNREADABLE) as error:
            raise ConfigurationError(f"the startup kit in {startup} cannot be read: {type(error).__name__}") from None
        if not isinstance(key, PrivateKey):
            raise ConfigurationError(f"the key of the startup kit in {startup} is of an unsupported type")
        if _public_bytes(chain[0].public_key()) != _public_bytes(key.public_key()):
            raise ConfigurationError(f"client.key and client.crt in {startup} do not belong together")
        return cls(site, chain, root, server_names, key)

    @classmethod
    def unsigned(cls, site: str) -> Identity:
        """Return the identity of a site without certificate, as in the simulator."""
        return cls(site)

    @property
    def is_signed(self) -> bool:
        """Whether the site can sign."""
        return self._private_key is not None

    @property
    def chain_pem(self) -> bytes:
        """The chain in PEM form, leaf first; public."""
        return b"".join(c.public_bytes(serialization.Encoding.PEM) for c in self.chain)

    def sign(self, statement: bytes) -> bytes:
        """Sign a statement with the certificate's key. The caller makes sure that it begins with its own domain.

        Raises:
            ValueError: a site without certificate.
        """
        key = self._private_key
        if isinstance(key, rsa.RSAPrivateKey):
            return key.sign(statement, _PSS, hashes.SHA256())
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key.sign(statement, ec.ECDSA(hashes.SHA256()))
        if isinstance(key, ed25519.Ed25519PrivateKey):
            return key.sign(statement)
        raise ValueError("a site without certificate cannot sign")


def load_identity(workspace: Path, site: str) -> Identity:
    """Return this site's certificate from its startup kit; the simulator has none (the policy must accept that)."""
    startup = workspace / "startup"
    if (startup / "client.crt").exists():
        return Identity.load(startup)
    return Identity.unsigned(site)


def verify_signature(certificate: x509.Certificate, statement: bytes, signature: bytes) -> None:
    """Check what ``Identity.sign`` made.

    Raises:
        AuthenticationError: the signature does not verify, or the certificate's key is of an unsupported type.
    """
    try:
        key = certificate.public_key()
        if isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, statement, _PSS, hashes.SHA256())
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, statement, ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, statement)
        else:
            raise AuthenticationError("the certificate's key is of an unsupported type")
    except InvalidSignature:
        raise AuthenticationError("a signature does not verify with the certificate it came with") from None
    except UNREADABLE:
        raise AuthenticationError("the certificate's key cannot be read") from None


def check_site_chain(
    encoded: Sequence[bytes], site: str, root: x509.Certificate, server_names: Collection[str], now: datetime
) -> x509.Certificate:
    """Check the certificate chain that a peer presents for a site.

    Args:
        encoded: certificates in DER form, leaf first.
        site: the name that the leaf must carry.
        root: this site's own copy of the project's root.
        server_names: names that are never a site's.
        now: with time zone.

    Returns:
        The leaf.

    Raises:
        AuthenticationError: malformed, not leading to the root, not valid now, or not this site's certificate.
    """
    from nvflare.lighter.utils import verify_cert_chain

    if not 1 <= len(encoded) <= _MAX_CHAIN or any(len(item) > _MAX_CERTIFICATE_BYTES for item in encoded):
        raise AuthenticationError(f"{site} shows a certificate chain of unacceptable length")
    try:
        leaf, *intermediates = (x509.load_der_x509_certificate(item) for item in encoded)
        verify_cert_chain(leaf, intermediates, root, now)
        check_role(leaf, site, server_names)
    except VerificationError:
        raise AuthenticationError(
            f"the certificate of {site} does not lead to this project's root or is not valid on {now:%Y-%m-%d}"
        ) from None
    except UNREADABLE:
        raise AuthenticationError(f"the certificate of {site} is malformed") from None
    return leaf


def fingerprint(certificate: x509.Certificate) -> bytes:
    """Return SHA-256 of the DER form, 32 bytes; ``openssl x509 -fingerprint -sha256`` prints the same."""
    return certificate.fingerprint(hashes.SHA256())


def public_key_bytes(certificate: x509.Certificate) -> bytes:
    """Return the certificate's public key in DER form, to compare keys of different certificates."""
    return _public_bytes(certificate.public_key())


def check_role(leaf: x509.Certificate, site: str, server_names: Collection[str]) -> None:
    """Check that a certificate is that of a site, of this one, and fit to sign.

    Raises:
        AuthenticationError: it belongs to another party, a server, an administrator or an authority.
        UNREADABLE: it is malformed.
    """
    name = _common_name(leaf)
    if name != site:
        raise AuthenticationError(f"the certificate shown for {site} names another party")
    if name in server_names:
        raise AuthenticationError(f"{site} is the name of a server, not of a site")
    roles = [attribute.value for attribute in leaf.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)]
    if roles not in ([], [_SITE_ROLE]):
        raise AuthenticationError(f"the certificate of {site} belongs to a server or an administrator")
    extensions = leaf.extensions
    alternative = _extension(extensions, x509.SubjectAlternativeName)
    if alternative is not None and list(alternative) != [x509.DNSName(site)]:
        raise AuthenticationError(f"the certificate of {site} lists host names, as those of servers do")
    constraints = _extension(extensions, x509.BasicConstraints)
    if constraints is not None and constraints.ca:
        raise AuthenticationError(f"the certificate of {site} belongs to a certificate authority")
    usage = _extension(extensions, x509.KeyUsage)
    if usage is not None and not usage.digital_signature:
        raise AuthenticationError(f"the certificate of {site} may not sign")
    purposes = _extension(extensions, x509.ExtendedKeyUsage)
    if purposes is not None and ExtendedKeyUsageOID.CLIENT_AUTH not in purposes:
        raise AuthenticationError(f"the certificate of {site} is not meant for clients")


def _extension(extensions: x509.Extensions, kind: type[_Extension]) -> _Extension | None:
    try:
        return extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


def _common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1:
        raise ValueError("a certificate must have exactly one common name")
    return str(names[0].value)


def _public_bytes(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
