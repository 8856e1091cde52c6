"""Certificates as ``verify`` needs them: whose they are, who issued them, what they signed."""

from __future__ import annotations

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes

from he_processors.errors import AuthenticationError
from nvflare_plugins.certificates import verify_signature


class FlareAuthority:
    """Believes certificates that the project's root issued; without a root, any that name the site.

    Security: without ``root`` a forger of all logs can bring certificates of his own; ``verify`` says so.
    """

    def __init__(self, root: x509.Certificate | None):
        self._root = root

    def fingerprint(self, site: str, certificate: str) -> str:
        """Return the hex SHA-256 of the certificate in DER form. Raises: AuthenticationError."""
        leaf = _load(certificate)
        names = [attribute.value for attribute in leaf.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
        if names != [site]:
            raise AuthenticationError("it names another site")
        if self._root is not None:
            try:
                leaf.verify_directly_issued_by(self._root)
            except (ValueError, TypeError, InvalidSignature):
                raise AuthenticationError("it was not issued by the given root") from None
        return leaf.fingerprint(hashes.SHA256()).hex()

    def check(self, certificate: str, statement: bytes, signature: bytes) -> None:
        """Check a signature by the certificate's key. Raises: AuthenticationError."""
        verify_signature(_load(certificate), statement, signature)


def _load(certificate: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificates(certificate.encode())[0]
    except ValueError:
        raise AuthenticationError("it is no certificate in PEM form") from None
