"""Whether a site's certificates towards its cluster can be used, and why its scheduler or a worker is not reached.

Dask tells neither: to it, whatever does not get through is a closed connection. The words here name no address, path or
name, for they may go to other parties.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
import struct
from datetime import UTC, datetime
from urllib.parse import urlsplit

from cryptography import x509

from he_processors.errors import ConfigurationError
from nvflare_plugins.data.declaration import ClusterSecurity

LOOK_S = 5.0
"""How long each step of a look at an address may take. Units: seconds."""


def load_certificates(security: ClusterSecurity) -> tuple[ssl.SSLContext, datetime]:
    """Return what this site shows and asks for towards its cluster, and when its own certificate ends.

    Raises:
        ConfigurationError: a file cannot be read or used, others may read the key, or the certificate is not valid now.
    """
    for name in ("ca", "cert", "key"):
        _check_readable(security, name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # Dask compares no names either
    try:
        context.load_verify_locations(security.ca)
        context.load_cert_chain(security.cert, security.key, password="")  # rather than ask for one
        cert = x509.load_pem_x509_certificates(security.cert.read_bytes())[0]
    except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
        why = error.reason if isinstance(error, ssl.SSLError) and error.reason else type(error).__name__
        raise ConfigurationError(
            f"the certificates of this site's cluster cannot be used ({_plain(why)}). Policy key: cluster.security. "
            "Remedy: name three files in PEM: ca, a certificate that it has signed, and the key of that one without a "
            "password."
        ) from None
    start, end, now = cert.not_valid_before_utc, cert.not_valid_after_utc, datetime.now(UTC)
    if not start <= now <= end:
        when = f"ended on {end:%Y-%m-%d %H:%M}" if end < now else f"begins on {start:%Y-%m-%d %H:%M}"
        raise ConfigurationError(
            f"this site's certificate towards its cluster {when} UTC. Policy key: cluster.security.cert. Remedy: sign "
            "one that is valid now, and look at this machine's clock."
        )
    return context, end


def why_not(address: str, context: ssl.SSLContext | None) -> str:
    """Look at an address of Dask's, and say why nothing comes from there.

    Args:
        address: tls://host:port, or tcp:// without a context.

    Returns:
        What to say of it after "it", without where it is.
    """
    try:
        place = urlsplit(address)
        with socket.create_connection((place.hostname or "", place.port or 0), LOOK_S) as link:
            if context is None:
                return _heard(link)
            with context.wrap_socket(link) as protected:
                return _heard(protected)
    except socket.gaierror:
        return "has a name that this machine does not know"
    except ConnectionRefusedError:
        return "is not there: nothing listens at its port, or a firewall refuses"
    except TimeoutError:
        return "does not answer: its machine or process stands still, or a firewall is between"
    except ssl.SSLCertVerificationError as error:
        return f"shows a certificate that does not pass here: {_plain(error.verify_message)}"
    except ssl.SSLError as error:
        _, alert, words = str(error.reason).partition("ALERT_")
        if alert:
            return f"does not take this site's certificate: {_plain(words)}"
        return "speaks no TLS"
    except (ValueError, OverflowError):
        return "has an address that is none"
    except OSError as error:
        return f"is not to be had from this machine: {_plain(os.strerror(error.errno or 0))}"


def require_own_user(end: socket.socket) -> None:
    """Refuse what is at the other end of a connection of this machine's loopback if another user runs it.

    Where there are no certificates, nothing else tells that a scheduler or worker is this site's own.

    Raises:
        ConfigurationError: the kernel names another user, or none.
    """
    wanted = tuple(_as_listed(*name[:2]) for name in (end.getpeername(), end.getsockname()))
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            for fields in map(str.split, lines):
                if (fields[1], fields[2]) == wanted and fields[7] == str(os.geteuid()):
                    return
    raise ConfigurationError(
        "a scheduler or worker that this site's cluster has without TLS is not run by the user who runs this site. "
        "Policy keys: cluster.scheduler, cluster.security. Remedy: run it as this user (which only Linux "
        "tells), or give the cluster certificates (tls://)."
    )


def _as_listed(host: str, port: int) -> str:
    """Return an address as the kernel lists it: words of 32 bits in the machine's order, and the port."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def _heard(link: socket.socket) -> str:
    """Return what to say of one that takes a connection. Raises: SSLError: it refuses, which TLS 1.3 tells only now."""
    if link.recv(1):
        return "answers, and not as Dask does here: it has another version, or was busy"
    return "closes connections at once: its log says why"


def _check_readable(security: ClusterSecurity, name: str) -> None:
    try:
        with getattr(security, name).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigurationError(
            f"cluster.security.{name} cannot be read ({type(error).__name__}): correct the path in the policy"
        ) from None
    if name == "key" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError("cluster.security.key may be read by others than its owner: chmod 600")


def _plain(words: str) -> str:
    """Return words of OpenSSL's or the system's, of which none comes from elsewhere, in our form."""
    return words.replace("_", " ").lower()
