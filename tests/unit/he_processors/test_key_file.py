from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from he_processors.additive.key_file import load_private_key, read_fingerprint, save_private_key
from he_processors.errors import AuthenticationError, ConfigurationError
from he_processors.paillier.keys import PaillierPrivateKey
from tests.support.he_toys import toy_okamoto_uchiyama, toy_paillier

PASSPHRASE = b"correct horse battery"
KEY = toy_paillier()


@pytest.fixture(scope="module")
def key_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "paillier.key"
    save_private_key(path, KEY, PASSPHRASE)
    return path


IMPORTED = PaillierPrivateKey.from_primes(KEY.p, KEY.q, allow_toy_keys=True)


@pytest.mark.parametrize("key", [IMPORTED, toy_okamoto_uchiyama()])
def test_round_trip(tmp_path: Path, key: object) -> None:
    save_private_key(tmp_path / "key", key, PASSPHRASE)
    assert load_private_key(tmp_path / "key", PASSPHRASE) == key


def test_structured_keys_keep_their_generators(key_path: Path) -> None:
    assert load_private_key(key_path, PASSPHRASE) == KEY


def test_the_file_is_private_and_nothing_else_is_left(key_path: Path) -> None:
    assert stat.S_IMODE(key_path.stat().st_mode) == 0o600
    assert [path.name for path in key_path.parent.iterdir()] == [key_path.name]


def test_the_file_shows_its_fingerprint_and_no_secret(key_path: Path) -> None:
    assert read_fingerprint(key_path) == KEY.public_key.fingerprint
    data = key_path.read_bytes()
    for secret in (KEY.p, KEY.q, KEY.p_generator):
        assert f"{secret:x}".encode() not in data and str(secret).encode() not in data
        assert secret.to_bytes((secret.bit_length() + 7) // 8, "big") not in data


def test_files_that_others_can_read_are_refused(key_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(key_path.read_bytes())
    for mode in (0o640, 0o604, 0o620):
        os.chmod(copy, mode)
        with pytest.raises(ConfigurationError):
            load_private_key(copy, PASSPHRASE)
    os.chmod(copy, 0o600)
    assert load_private_key(copy, PASSPHRASE) == KEY


def test_a_wrong_passphrase_and_any_change_are_refused(key_path: Path, tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError):
        load_private_key(key_path, b"wrong horse battery")
    data = key_path.read_bytes()
    changed = tmp_path / "changed"
    changed.touch(mode=0o600)
    for position in (5, 40, 60, 70, len(data) - 1):
        changed.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(AuthenticationError):
            load_private_key(changed, PASSPHRASE)
    for wrong in (b"", data[:40], b"XXXX" + data[4:], data + b"\0" * (1 << 16)):
        changed.write_bytes(wrong)
        with pytest.raises(ConfigurationError):
            load_private_key(changed, PASSPHRASE)


def test_short_passphrases_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        save_private_key(tmp_path / "key", KEY, b"short")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError):
        save_private_key(path, KEY, PASSPHRASE)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]
