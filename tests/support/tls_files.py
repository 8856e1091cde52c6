"""Certificates of a made-up authority, as files: one that scheduler, workers and site of a cluster share."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


def make_tls_files(folder: Path, begins_in: timedelta = -timedelta(hours=1)) -> dict[str, str]:
    """Write ca, cert and key; return their paths. Args: begins_in: when the certificates' one day begins, from now."""
    folder.mkdir(parents=True, exist_ok=True)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer, subject = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("authority of a test", "cluster")
    )
    now = datetime.now(UTC)

    def builder(of: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        found = x509.CertificateBuilder().subject_name(of).issuer_name(issuer).public_key(public)
        found = found.serial_number(x509.random_serial_number())
        return found.not_valid_before(now + begins_in).not_valid_after(now + begins_in + timedelta(days=1))

    is_ca = x509.BasicConstraints(ca=True, path_length=None)
    ca = builder(issuer, ca_key.public_key()).add_extension(is_ca, critical=True).sign(ca_key, hashes.SHA256())
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
    cert = builder(subject, key.public_key()).add_extension(names, critical=False).sign(ca_key, hashes.SHA256())
    files = {
        "ca": ca.public_bytes(Encoding.PEM),
        "cert": cert.public_bytes(Encoding.PEM),
        "key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    }
    for name, content in files.items():
        (folder / f"{name}.pem").write_bytes(content)
        (folder / f"{name}.pem").chmod(0o600)
    return {name: str(folder / f"{name}.pem") for name in files}
