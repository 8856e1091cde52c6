"""The reader's part for masks, tags, MACs and what the server adds; see `reader.py`."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from tests.vectors.form import Given, blob, formats, numbers
from tests.vectors.reader import P, derive, fields, frame, mac, message_key, require


def gathered(given: Given) -> Any:
    session, rank, world = blob(given["session"]), given["rank"], len(given["pair_secrets"]) + 1
    kind, place, codec, counter = given["place"]

    def one(peer: int, sender: int, recipient: int, content: bytes) -> bytes:
        key = derive(blob(given["pair_secrets"][str(peer)]), session, "pair-macs")
        digest = hashlib.sha256(content).digest()
        return mac(key, "veilboost/1/pair-mac", sender, recipient, digest, kind, place, codec, counter)[:16]

    if "content" in given:
        content = blob(given["content"])
        macs = [bytes(16) if peer == rank else one(peer, rank, peer, content) for peer in range(world)]
        return {"message": (content + b"".join(macs)).hex()}
    message, sender = blob(given["message"]), given["sender"]
    require(len(message) >= 16 * world, "forged")
    content, macs_ = message[: len(message) - 16 * world], message[len(message) - 16 * world :]
    require(macs_[16 * rank : 16 * rank + 16] == one(sender, sender, rank, content), "forged")
    return {"content": content.hex()}


def aes_words(key: bytes, first_block: int, n_blocks: int, width: int = 8) -> np.ndarray:
    start = first_block.to_bytes(16, "big")
    stream = Cipher(algorithms.AES(key), modes.CTR(start)).encryptor().update(bytes(16 * n_blocks))
    return np.frombuffer(stream, dtype=f"<u{width}")


def word_stream(key: bytes, n: int, bits: int) -> list[int]:
    """Words, one behind the other."""
    if bits == 64:
        return keystream(key, n, 0)
    return [int(word) for word in aes_words(key, 0, -(-n // 4), 4)[:n]]


def keystream(key: bytes, n: int, modulus: int) -> list[int]:
    """Words, or residues below a modulus by rejection, in runs of 32768; each reading begins at a whole block."""
    found: list[int] = []
    block = 0
    while len(found) < n:
        run_end = min(n, (len(found) // 32768 + 1) * 32768)
        missing = run_end - len(found)
        words = aes_words(key, block, -(-missing // 2))[:missing].tolist()
        block += -(-missing // 2)
        if modulus:
            shift = 64 - (modulus - 1).bit_length()
            words = [word >> shift for word in words if word >> shift < modulus]
        found += words
    return found


def pair_masks(given: Given, purpose: str) -> list[tuple[int, bytes]]:
    """Return the sign and key of each mask of a site: of its pairs, then of the blinding."""
    session, rank = blob(given["session"]), given["rank"]
    keys = []
    for name, secret in given["pair_secrets"].items():
        peer = int(name)
        key = derive(blob(secret), session, f"{purpose}/pair", min(rank, peer), max(rank, peer))
        keys.append((1 if rank < peer else -1, key))
    return [*keys, (1, derive(blob(given["group_secret"]), session, f"{purpose}/group"))]


def width_of(given: Given) -> tuple[int, int, str]:
    """Return bits of words, what stands for the modulus in the key, and the code of a word."""
    bits = given.get("bits", 64)
    return bits, {64: 0, 32: 2**32}[bits], {64: "Q", 32: "I"}[bits]


def masked_words(given: Given, values: list[int], modulus: int) -> list[int]:
    bits, of_words, _ = width_of(given)
    n, modulus_ = len(values), modulus or of_words
    info = fields("veilboost/1/masks/message", given["counter"], given["kind"], given["phase"], n, modulus_)
    readable = given.get("readable", False)
    *pairs, blinding = pair_masks(given, "masks/readable" if readable else "masks")
    total = list(values)
    for sign, key in pairs + ([blinding] if given["rank"] == 0 and not readable else []):
        drawn = message_key(key, info)
        stream = keystream(drawn, n, modulus) if modulus else word_stream(drawn, n, bits)
        total = [value + sign * one for value, one in zip(total, stream, strict=True)]
    return [value % (modulus or 2**bits) for value in total]


def masked(given: Given) -> Any:
    words = masked_words(given, numbers(given["values"]), given["modulus"] or 0)
    return {"masked": struct.pack(f"<{len(words)}{width_of(given)[2]}", *words).hex()}


def residue_stream(key: bytes, counter: int, n: int) -> list[int]:
    blocks = b"".join(struct.pack("<QQ", counter, k) for k in range(n))
    data = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(blocks)  # noqa: S305  # blocks never repeat
    return [int.from_bytes(data[16 * k : 16 * k + 16], "little") for k in range(n)]


def masked_residues_of(given: Given, residues: list[int]) -> list[int]:
    *pairs, blinding = pair_masks(given, "residues")
    for sign, key in pairs + ([blinding] if given["rank"] == 0 else []):
        stream = residue_stream(key, given["counter"], len(residues))
        residues = [(one + sign * mask) % P for one, mask in zip(residues, stream, strict=True)]
    return residues


def masked_residues(given: Given) -> Any:
    found = masked_residues_of(given, given["residues"])
    return {"masked": struct.pack(f"<{len(found)}Q", *found).hex()}


def tags(given: Given, values: list[int], residues: list[int]) -> list[int]:
    blocks = [part[i : i + 1024] for part in (values, residues) for i in range(0, len(part), 1024)]
    names = (given["counter"], given["kind"], given["phase"], len(values), len(residues))
    info = fields("veilboost/1/sum-tags/coefficients", *names)
    key = message_key(derive(blob(given["group_secret"]), blob(given["session"]), "sum-tags"), info)
    drawn = keystream(key, 2 * (1 + len(blocks)), P)
    found = []
    for rho, *scales in (drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]):
        sums = (sum(pow(rho, i, P) * value for i, value in enumerate(block)) for block in blocks)
        found.append(sum(s * total for s, total in zip(scales, sums, strict=True)) % P)
    return found


def contribution(given: Given) -> Any:
    values, residues = numbers(given["values"]), given["residues"]
    words = masked_words(given, values, 0)
    tail = masked_residues_of(given, [*residues, *tags(given, values, residues)])
    code = width_of(given)[2]
    packed = struct.pack(f"<{len(words)}{code}{len(tail)}Q", *words, *tail)
    return {"payload": packed.hex(), "tail": 8 * len(tail)}


def opened_sum(given: Given) -> Any:
    payload, (bits, of_words, code) = blob(given["payload"]), width_of(given)
    n_bytes = len(payload) - given["tail"]
    require(n_bytes >= 0 and n_bytes % (bits // 8) == given["tail"] % 8 == 0)
    n = n_bytes // (bits // 8)
    found = list(struct.unpack(f"<{n}{code}{given['tail'] // 8}Q", payload))
    words, tail = found[:n], found[n:]
    require(all(residue < P for residue in tail), "forged")
    info = fields("veilboost/1/masks/message", given["counter"], given["kind"], given["phase"], n, of_words)
    blinding = word_stream(message_key(pair_masks(given, "masks")[-1][1], info), n, bits)
    half = 2 ** (bits - 1)
    values = [((word - mask + half) % 2**bits) - half for word, mask in zip(words, blinding, strict=True)]
    stream = residue_stream(pair_masks(given, "residues")[-1][1], given["counter"], len(tail))
    plain = [(residue - mask) % P for residue, mask in zip(tail, stream, strict=True)]
    require(tags(given, values, plain[:-2]) == plain[-2:], "forged")
    require(all(abs(value) <= (P - 1) // 2 for value in values), "forged")
    return {"values": values, "residues": plain[:-2]}


def added(given: Given) -> Any:
    total: list[int] | None = None
    for data in given["frames"]:
        one = frame({"data": data})
        payload, tail, n = blob(one["payload"]), one["tail"], one["values"]
        require(one["codec"] in ("MASKED", "PLAIN", "PLUGIN", "MASKED_32", "PLAIN_32"))
        is_short = one["codec"].endswith("_32")
        require(not is_short or one["kind"] == "HISTOGRAM")
        width, code = (4, "I") if is_short else (8, "Q")
        require(tail % 8 == 0 and len(payload) == width * n + tail)
        form = f"<{n}{code}{tail // 8}Q"
        words = list(struct.unpack(form, payload))
        require(all(residue < P for residue in words[n:]) and len(words) == len(total or words))
        total = [a + b for a, b in zip(total or [0] * len(words), words, strict=True)]
        total = [a % 2 ** (8 * width) for a in total[:n]] + [a % P for a in total[n:]]
    assert total is not None
    return {"payload": struct.pack(form, *total).hex()}


FORMATS = formats(globals())
