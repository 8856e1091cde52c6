"""Small random changes of bytes, from a seed: what a fuzzer without coverage does."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

_NUMBERS = [0, 1, 2, 7, 8, 16, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 1 << 24, (1 << 31) - 1, 1 << 31]
_NUMBERS += [(1 << 32) - 1, 1 << 32, (1 << 61) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
_CODES = ((1, "<B"), (2, "<H"), (4, "<I"), (8, "<Q"), (8, ">Q"))
_WORDS = (b"null", b"true", b"-1", b"1e999", b"NaN", b"[]", b"{}", b'""', b"9" * 40, b"\\ud800", b"[" * 2000, b"0.5")
_WORDS += (b'"a":1', b"\xff\xfe", b"\0", b"\n", b",", b'"', b"\r\n", b"1" * 5000)
_HEAD = 96  # half of the changes go to the bytes that steer the rest


class Mutator:
    """Makes inputs of a corpus; inputs that were accepted may join it for a while."""

    def __init__(self, corpus: Sequence[bytes], seed: int, most: int) -> None:
        self._draw = random.Random(seed)
        self._corpus = [data for data in corpus if len(data) <= most]
        self._accepted: list[bytes] = []
        self._most = most

    def next(self) -> bytes:
        """Return the next input."""
        draw = self._draw
        pool = self._accepted if self._accepted and draw.random() < 0.3 else self._corpus
        data = bytearray(pool[int(draw.random() * len(pool))])
        for _ in range(1 if draw.random() < 0.5 else 1 + int(draw.random() * 6)):
            self._change(data)
        return bytes(data[: self._most])

    def accepted(self, data: bytes) -> None:
        """Take note of an input that a parser accepted."""
        if self._draw.random() < 0.05:
            if len(self._accepted) < 128:
                self._accepted.append(data)
            else:
                self._accepted[int(self._draw.random() * 128)] = data

    def _change(self, data: bytearray) -> None:
        draw, n = self._draw, len(data)
        kind = int(draw.random() * 10)
        end = min(n, _HEAD) if draw.random() < 0.5 else n
        place = int(draw.random() * end) if end else 0
        if not n:
            data += draw.randbytes(1 + int(draw.random() * 40))
        elif kind <= 1:
            data[place] ^= 1 << int(draw.random() * 8)
        elif kind == 2:
            data[place] = int(draw.random() * 256)
        elif kind <= 4:
            size, code = _CODES[int(draw.random() * len(_CODES))]
            number = _NUMBERS[int(draw.random() * len(_NUMBERS))] % (1 << 8 * size)
            data[place : place + size] = struct.pack(code, number)
        elif kind == 5:
            del data[place : place + 1 + int(draw.random() ** 3 * (n - place))]
        elif kind == 6:
            data[place:place] = data[place : place + 1 + int(draw.random() * 24)]
        elif kind == 7:
            other = self._corpus[int(draw.random() * len(self._corpus))]
            start = int(draw.random() * (len(other) + 1))
            data[place : place + int(draw.random() * 16)] = other[start : start + 1 + int(draw.random() * 32)]
        elif kind == 8:
            data[place : place + int(draw.random() * 6)] = _WORDS[int(draw.random() * len(_WORDS))]
        else:
            data[place:place] = draw.randbytes(1 + int(draw.random() * 8))
