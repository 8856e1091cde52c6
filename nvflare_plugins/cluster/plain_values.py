"""What may go to a worker and come back: plain values, so that no object of ours, and no secret in one, is pickled."""

from __future__ import annotations

from typing import Any

import numpy as np

_SINGLE = (type(None), bool, int, float, str, bytes)
_NUMBERS = "biuf"


def require_plain(value: Any) -> int:
    """Return about how many bytes a value takes on the way.

    Args:
        value: None, a bool, a number, a text, bytes, an array of numbers; lists, tuples and dictionaries of these.

    Raises:
        TypeError: something else; the message names the type alone.
    """
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray or value.dtype.kind not in _NUMBERS:
            raise TypeError(f"an array of {value.dtype} does not go to a worker")
        return int(value.nbytes)
    if type(value) in (bytes, str):
        return len(value)
    if type(value) in _SINGLE:
        return 8
    if type(value) in (list, tuple):
        return sum(map(require_plain, value))
    if type(value) is dict:
        return sum(require_plain(key) + require_plain(one) for key, one in value.items())
    raise TypeError(f"a {type(value).__name__} does not go to a worker")
