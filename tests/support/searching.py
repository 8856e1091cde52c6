"""Searches of short secrets among bytes that are drawn anew in each run, such as ciphertexts and sealed messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

N_RUNS = 3


def found_every_time(search: Callable[[int], Iterable[bytes]]) -> set[bytes]:
    """Return what each of three runs shows: what leaks is in all of them, and chance puts it there in few.

    Four bytes stand in a given 300 kB by chance with probability p = 7e-5, in three runs with p^3 = 4e-13; a thousand
    of them all fail a test with less than 1e-9.

    Args: search: runs what is searched, given the number of the run, and returns the secrets it finds.
    """
    return set.intersection(*(set(search(number)) for number in range(N_RUNS)))
