"""A Dask cluster on this machine's loopback: a scheduler and single-threaded workers, each its own process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

ROOT = Path(__file__).resolve().parents[2]
_STARTED = re.compile(r"(?:Scheduler at|Registered to):\s+((?:tcp|tls)://\S+)")

_REGISTERED = re.compile(r"Registered to:\s+((?:tcp|tls)://\S+)")


@dataclass(slots=True)
class LocalDask:
    """A running cluster.

    Attributes:
        folder: where scheduler and workers write, logs included.
        pids: of the workers, or of what starts each of them again.
    """

    address: str
    folder: Path
    scheduler_pid: int
    pids: list[int] = field(default_factory=list)


@contextmanager
def local_cluster(
    n_workers: int,
    *,
    threads: int = 1,
    spills: bool = False,
    options: tuple[str, ...] = (),
    protocol: str = "tcp",
    nanny: bool = False,
    worker_options: tuple[str, ...] = (),
    names: tuple[str, ...] = (),
    port: int = 0,
) -> Iterator[LocalDask]:
    """Start a cluster, and end it whatever has become of it.

    Args:
        options: of both commands, such as of TLS.
        worker_options: of workers alone.
        names: of the workers, to Dask; left out, their numbers.
        port: of the scheduler; 0 is one that is free.
        nanny: workers that die are started again.
    """
    memory = "DASK_DISTRIBUTED__WORKER__MEMORY__"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
        "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
    }
    environment |= {} if spills else {f"{memory}TARGET": "False", f"{memory}SPILL": "False"}
    running: list[subprocess.Popen[bytes]] = []
    with TemporaryDirectory(prefix="dask_") as name:
        folder = Path(name)

        def start(log: str, *command: str) -> subprocess.Popen[bytes]:
            whole = [sys.executable, "-m", "distributed.cli." + command[0], *command[1:], *options]
            with (folder / log).open("wb") as file:
                process = subprocess.Popen(
                    whole, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
                )
            running.append(process)
            return process

        def address_in(log: str, process: subprocess.Popen[bytes], what: re.Pattern[str] = _STARTED) -> str:
            for _ in range(1200):
                found = what.search((folder / log).read_text(errors="replace"))
                if found:
                    return found[1]
                if process.poll() is not None:
                    break
                time.sleep(0.05)
            raise RuntimeError((folder / log).read_text(errors="replace"))

        try:
            scheduler = start(
                "scheduler.log",
                "dask_scheduler",
                "--host",
                f"{protocol}://127.0.0.1",
                "--port",
                f"{port}",
                "--no-dashboard",
            )
            address = address_in("scheduler.log", scheduler)
            workers = [
                start(
                    f"worker{number}.log",
                    *("dask_worker", address, "--host", "127.0.0.1", "--nthreads", str(threads)),
                    "--nanny" if nanny else "--no-nanny",
                    *(
                        "--no-dashboard",
                        "--name",
                        names[number] if names else f"{number}",
                        "--local-directory",
                        str(folder),
                    ),
                    *worker_options,
                )
                for number in range(n_workers)
            ]
            cluster = LocalDask(address, folder, scheduler.pid, [worker.pid for worker in workers])
            for number, worker in enumerate(workers):
                address_in(f"worker{number}.log", worker, _REGISTERED)  # else it may stall before anybody knows it
            yield cluster
        finally:
            for process in reversed(running):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the worker that a nanny has started
                process.wait()


def stall(pid: int) -> None:
    """Stop a process; it has stopped when this returns, which a signal alone does not say."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


def worker_of(pid: int) -> int:
    """Return the worker that a nanny has started."""
    children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    for child in (one for of_thread in children for one in of_thread):
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise RuntimeError("the nanny has no worker")


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
