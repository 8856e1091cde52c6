"""Private keys at rest: one file, encrypted under a passphrase, readable by its owner only.

Job keys live in memory and die with the job; files are for keys that an operator wants to keep.

Layout: magic 4s, version u8, fingerprint 32s, salt 16s, nonce 12s, then AES-256-GCM of the key's numbers with all
that precedes as associated data. The AES key is scrypt (N = 2^17, r = 8, p = 1) of the passphrase.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from he_processors.errors import AuthenticationError, ConfigurationError
from he_processors.okamoto_uchiyama.keys import OkamotoUchiyamaPrivateKey
from he_processors.paillier.keys import PaillierPrivateKey
from he_processors.randomness import OS_RANDOMNESS, RandomSource

PrivateKey = PaillierPrivateKey | OkamotoUchiyamaPrivateKey

_KEY_TYPES: dict[str, type[PrivateKey]] = {
    "paillier": PaillierPrivateKey,
    "okamoto-uchiyama": OkamotoUchiyamaPrivateKey,
}
_MAGIC = b"VBSK"
_VERSION = 1
_PREFIX = struct.Struct("<4sB32s16s12s")
_MAX_FILE_BYTES = 1 << 16
_MIN_PASSPHRASE_BYTES = 12
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def save_private_key(path: Path, key: PrivateKey, passphrase: bytes, source: RandomSource = OS_RANDOMNESS) -> None:
    """Write a key, atomically, mode 0600.

    Raises:
        ConfigurationError: the passphrase is shorter than 12 bytes.
    """
    if len(passphrase) < _MIN_PASSPHRASE_BYTES:
        raise ConfigurationError(f"a key file needs a passphrase of at least {_MIN_PASSPHRASE_BYTES} bytes")
    salt, nonce = source.bytes(16), source.bytes(12)
    prefix = _PREFIX.pack(_MAGIC, _VERSION, bytes.fromhex(key.public_key.fingerprint), salt, nonce)
    scheme = next(name for name, key_type in _KEY_TYPES.items() if type(key) is key_type)
    numbers = {name: None if value is None else hex(value) for name, value in asdict(key).items()}
    body = json.dumps({"scheme": scheme, "numbers": numbers}).encode()
    sealed = AESGCM(_derive(passphrase, salt)).encrypt(nonce, body, prefix)
    _write_private(path, prefix + sealed)


def load_private_key(path: Path, passphrase: bytes) -> PrivateKey:
    """Read a key.

    Raises:
        ConfigurationError: the file is no key file, or others may read or write it.
        AuthenticationError: the passphrase is wrong or the file was changed.
    """
    data = _read_private(path)
    _, _, fingerprint, salt, nonce = _PREFIX.unpack_from(data)
    try:
        body = AESGCM(_derive(passphrase, salt)).decrypt(nonce, data[_PREFIX.size :], data[: _PREFIX.size])
    except InvalidTag:
        raise AuthenticationError("the private key file does not open: wrong passphrase, or changed") from None
    key = _key_from_json(body)
    if key.public_key.fingerprint != fingerprint.hex():
        raise AuthenticationError("the private key file holds another key than it names")
    return key


def read_fingerprint(path: Path) -> str:
    """Return the fingerprint that a key file names, without opening it.

    Raises:
        ConfigurationError: the file is no key file, or others may read or write it.
    """
    return str(_PREFIX.unpack_from(_read_private(path))[2].hex())


def _key_from_json(body: bytes) -> PrivateKey:
    # Authenticated content: only this program, given the passphrase, wrote it.
    content = json.loads(body)
    key_type = _KEY_TYPES[content["scheme"]]
    stored = content["numbers"]
    numbers: dict[str, Any] = {
        field.name: None if stored[field.name] is None else int(stored[field.name], 16) for field in fields(key_type)
    }
    return key_type(**numbers)


def _derive(passphrase: bytes, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, n=1 << 17, r=8, p=1).derive(passphrase)


def _write_private(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _read_private(path: Path) -> bytes:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_mode & _OTHERS or status.st_uid != os.geteuid():
            raise ConfigurationError("a private key file must belong to this user alone, mode 0600")
        data = file.read(_MAX_FILE_BYTES + 1)
    if not _PREFIX.size <= len(data) <= _MAX_FILE_BYTES or data[:5] != _MAGIC + bytes([_VERSION]):
        raise ConfigurationError("the file is not a private key file of this version")
    return data
