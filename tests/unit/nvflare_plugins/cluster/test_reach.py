"""What a site says of certificates that cannot be used, and of a scheduler or worker that it does not reach."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import WorkerLost
from nvflare_plugins.cli.main import main
from nvflare_plugins.data.declaration import Cluster, ClusterSecurity
from nvflare_plugins.workers import dask_connection as reach
from nvflare_plugins.workers import dask_workers
from nvflare_plugins.workers.workers import Workers
from tests.support.local_cluster import make_tls_files
from tests.support.workers_here import workers_here


def security(files: dict[str, str]) -> ClusterSecurity:
    return ClusterSecurity(*(Path(files[name]) for name in ("ca", "cert", "key")))


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], None], scheme: str = "tls") -> Iterator[str]:
    """Take one connection and do something with it; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            link, _ = server.accept()
            with link, contextlib.suppress(OSError):
                answer(link)

        thread = threading.Thread(target=take)
        thread.start()
        yield f"{scheme}://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def as_server(files: dict[str, str]) -> Callable[[socket.socket], None]:
    """Return what a scheduler does with these certificates."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files["ca"])
    context.load_cert_chain(files["cert"], files["key"])
    context.verify_mode = ssl.CERT_REQUIRED

    def answer(link: socket.socket) -> None:
        with context.wrap_socket(link, server_side=True) as protected:
            protected.sendall(b"x")
            protected.recv(1)

    return answer


def test_certificates_that_can_be_used(tmp_path: Path) -> None:
    _, end = reach.load_certificates(security(make_tls_files(tmp_path)))
    assert end.tzinfo is not None


@pytest.mark.parametrize(("begins_in", "words"), [(-timedelta(days=3), "ended on"), (timedelta(days=1), "begins on")])
def test_a_certificate_that_is_not_valid_now_is_named(tmp_path: Path, begins_in: timedelta, words: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"towards its cluster {words} .* cluster\.security\.cert"):
        reach.load_certificates(security(make_tls_files(tmp_path, begins_in)))


def test_files_that_are_no_pair_no_pem_or_open_to_others_are_refused(tmp_path: Path) -> None:
    own, other = make_tls_files(tmp_path / "own"), make_tls_files(tmp_path / "other")
    with pytest.raises(ConfigurationError, match=r"key values mismatch"):
        reach.load_certificates(security({**own, "key": other["key"]}))
    with pytest.raises(ConfigurationError, match=r"cannot be used .* three files in PEM"):
        reach.load_certificates(security({**own, "ca": own["key"]}))
    with pytest.raises(ConfigurationError, match=r"security\.ca cannot be read \(FileNotFoundError\)"):
        reach.load_certificates(security({**own, "ca": str(tmp_path / "none")}))
    Path(own["key"]).chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        reach.load_certificates(security(own))


def test_a_key_with_a_password_is_refused_and_none_is_asked_for(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    files = make_tls_files(tmp_path)
    key = serialization.load_pem_private_key(Path(files["key"]).read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"word")
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    Path(files["key"]).write_bytes(key.private_bytes(*form, locked))
    with pytest.raises(ConfigurationError, match="without a password"):
        reach.load_certificates(security(files))


def test_what_is_not_reached_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = make_tls_files(tmp_path / "own"), make_tls_files(tmp_path / "other")
    mine = reach.load_certificates(security(own))[0]
    mixed = reach.load_certificates(security({**own, "ca": other["ca"]}))[0]
    stranger = reach.load_certificates(security({**other, "ca": own["ca"]}))[0]
    with listening(as_server(own)) as address:
        assert "another version, or was busy" in reach.why_not(address, mine)
    with listening(as_server(own)) as address:
        assert "shows a certificate that does not pass here" in reach.why_not(address, mixed)
    with listening(as_server(own)) as address:
        assert "does not take this site's certificate" in reach.why_not(address, stranger)
    with listening(lambda link: link.sendall(b"SSH-2.0-x\r\n" * 9)) as address:
        assert reach.why_not(address, mine) == "speaks no TLS"
    with listening(lambda link: None, "tcp") as address:
        assert "closes connections at once" in reach.why_not(address, None)
    assert "nothing listens at its port" in reach.why_not(address, mine)
    assert "does not know" in reach.why_not("tls://nobody.invalid:1", mine)
    monkeypatch.setattr(reach, "LOOK_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:  # as a process that stands still
        assert "stands still" in reach.why_not(f"tls://127.0.0.1:{server.getsockname()[1]}", mine)


def test_the_check_of_a_site_tries_its_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["site-setup", str(tmp_path), "--example"]) == 0
    policy = tmp_path / "local" / "veilboost.json"
    files = make_tls_files(tmp_path / "tls")
    cluster = {"scheduler": "tls://dask.bank.internal:8786", "workers": 2, "security": files}
    policy.write_text(json.dumps({**json.loads(policy.read_text()), "cluster": cluster}))
    asked = []

    def opened(named: Cluster) -> Workers:
        asked.append(named)
        if named.workers == 3:
            raise WorkerLost("worker 1 is lost")
        return workers_here(named.workers)

    monkeypatch.setattr(dask_workers, "open_workers", opened)
    assert main(["site-setup", str(tmp_path), "--check"]) == 1
    assert "certificate towards its cluster ends on" in capsys.readouterr().out, "valid for one day"
    monkeypatch.setattr(dask_workers, "_SOON", timedelta(hours=1))
    assert main(["site-setup", str(tmp_path), "--check"]) == 0
    policy.write_text(policy.read_text().replace('"workers": 2', '"workers": 3'))
    assert main(["site-setup", str(tmp_path), "--check"]) == 1
    assert "worker 1 is lost" in capsys.readouterr().out
    assert [one.workers for one in asked] == [2, 2, 3]


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_without_certificates_who_listens_has_to_be_this_sites_user(
    family: socket.AddressFamily, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        socket.create_server((host, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as here,
        server.accept()[0],
    ):
        reach.require_own_user(here)
        monkeypatch.setattr("os.geteuid", lambda: 4711)
        with pytest.raises(ConfigurationError, match=r"is not run by the user who runs this site.*Remedy: run it as"):
            reach.require_own_user(here)
