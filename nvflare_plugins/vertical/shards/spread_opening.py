"""The opening of sums divided among the active party's workers, which hold its secret key.

One worker would open no faster than the party's own process, and what is small is opened there: a call costs as much as
some fifty sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from he_processors.additive.scheme import Decryptor
from he_processors.histogram.bins import BinLayout
from he_processors.histogram.plain_sums import BinSums, NodeTotal
from nvflare_plugins.cluster.workers import Workers, collect
from nvflare_plugins.vertical.protocol.elgamal_scheme import ElGamalGradientOwner, OpenRows
from nvflare_plugins.vertical.protocol.encrypted_scheme import EncryptedGradientOwner

LEAST_SLOTS = 64  # opened by one worker, of points: more than a millisecond
LEAST_CIPHERTEXTS = 8  # the same: as many as are decrypted side by side


def spread_opening(owner: object, workers: Workers) -> bool:
    """Have an owner's sums opened by its workers, if there are several; return whether they are.

    The workers hold an ``EncryptShard`` that opens.
    """
    if len(workers) < 2:
        return False
    if isinstance(owner, ElGamalGradientOwner):
        owner.open_with(SpreadPoints(owner.open_rows, workers))
    elif isinstance(owner, EncryptedGradientOwner):
        owner.open_with(lambda here: SpreadDecryptor(here, workers))
    else:
        return False
    return True


class SpreadDecryptor:
    """Ciphertexts, a run of them at each worker."""

    def __init__(self, here: Decryptor, workers: Workers) -> None:
        """Args: here: decrypts what is too little for two workers."""
        self.plaintext_bits = here.plaintext_bits
        self._here, self._workers = here, workers

    def decrypt(self, ciphertexts: NDArray[np.uint8]) -> Sequence[int]:
        """Decrypt. Shapes: ciphertexts: uint8[n, width] in wire form; result: n signed integers."""
        n_parts = min(len(self._workers), len(ciphertexts) // LEAST_CIPHERTEXTS)
        if n_parts < 2:
            return self._here.decrypt(ciphertexts)
        parts = [ciphertexts[part] for part in _even(len(ciphertexts), n_parts)]
        found = collect([self._workers.call(n, "decrypt", np.array(part)) for n, part in enumerate(parts)])
        return list(itertools.chain.from_iterable(found))


class SpreadPoints:
    """Sums of points, some nodes or some features at each worker: a feature's sums in a node are checked together."""

    def __init__(self, here: OpenRows, workers: Workers) -> None:
        """Args: here: opens what is too little for two workers."""
        self._here, self._workers = here, workers

    def __call__(self, body: NDArray[np.uint8], layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Open and check. Shapes: body: uint8[n_columns, n_nodes * n_slots, 64]; result: one for each of ``totals``."""
        n_nodes, n_parts = len(totals), min(len(self._workers), body.shape[1] // LEAST_SLOTS)
        if n_parts < 2:
            return self._here(body, layout, totals)
        points = body.reshape(len(body), n_nodes, layout.n_slots, -1)
        of_nodes, of_features = _even(n_nodes, n_parts), _even(layout.n_features, n_parts)
        by_nodes = _largest(of_nodes) * layout.n_features <= _largest(of_features) * n_nodes
        whole = slice(0, n_nodes), slice(0, layout.n_features)
        shares = [
            (part, whole[1]) if by_nodes else (whole[0], part) for part in (of_nodes if by_nodes else of_features)
        ]
        futures = []
        for number, (nodes, features) in enumerate(shares):
            slots = slice(int(layout.starts[features.start]), int(layout.starts[features.stop]))
            mine = points[:, nodes, slots].reshape(len(body), -1, body.shape[2])
            plain = [(one.n_rows, one.g, one.h, one.lower) for one in totals[nodes]]
            args = (np.ascontiguousarray(mine), layout.n_bins[features], plain)
            futures.append(self._workers.call(number, "open_points", *args))
        opened = collect(futures)
        if by_nodes:
            return [BinSums(g, h) for part in opened for g, h in zip(*part, strict=True)]
        return [
            BinSums(*(np.concatenate(part, axis=-1) for part in zip(*of_node, strict=True)))
            for of_node in _by_node(opened)
        ]


def _by_node(opened: list[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> list[list[tuple[NDArray[np.int64], ...]]]:
    """Return for each node g and h of every worker. Shapes: opened: of each worker g and h, int64[n_nodes, ...]."""
    return [[(g[node], h[node]) for g, h in opened] for node in range(len(opened[0][0]))]


def _even(n: int, n_parts: int) -> list[slice]:
    """Divide a range into parts that are not empty, and as even as they can be."""
    ends = [n * number // n_parts for number in range(n_parts + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends) if start < stop]


def _largest(parts: list[slice]) -> int:
    lengths: list[int] = [part.stop - part.start for part in parts]
    return max(lengths)
