"""Reading the array files (.npz) that a site keeps for itself, without trusting what lies on the disk.

NumPy's own reader evaluates headers as Python expressions, which failed now and then in threads under Python 3.11, and
lets through whatever zip, zlib and the interpreter raise about a damaged file. Here a file is what ``numpy.savez``
writes, of plain numbers, or a ``ValueError``.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SUFFIX = ".npy"
_PREFIX = struct.Struct("<6s2BH")
_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(
    rb"\{'descr': '([<|][biuf]\d{1,2})', 'fortran_order': False, 'shape': \(((?:\d{1,12}, ?)*(?:\d{1,12})?)\), \} *\n"
)
_MAX_DIMENSIONS = 2
_DAMAGED = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    OverflowError,
    MemoryError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file by name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not what ``numpy.savez`` writes, or cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if len(set(names)) != len(names) or not all(name.endswith(_SUFFIX) for name in names):
                raise ValueError("not a file of arrays")
            return {name.removesuffix(_SUFFIX): _array(archive.read(name)) for name in names}
    except FileNotFoundError:
        raise
    except _DAMAGED:
        raise ValueError(f"{path.name} is not a file of arrays that this program wrote") from None


def _array(data: bytes) -> NDArray[Any]:
    magic, major, _, length = _PREFIX.unpack_from(data)
    header = _HEADER.fullmatch(data, _PREFIX.size, _PREFIX.size + length)
    if magic != _MAGIC or major != 1 or header is None:
        raise ValueError("not an array")
    kind = np.dtype(header[1].decode())
    shape = tuple(int(size) for size in re.findall(rb"\d+", header[2]))
    content = data[_PREFIX.size + length :]
    if len(shape) > _MAX_DIMENSIONS or len(content) != math.prod(shape) * kind.itemsize:
        raise ValueError("not an array")
    return np.frombuffer(content, dtype=kind).reshape(shape).copy()
