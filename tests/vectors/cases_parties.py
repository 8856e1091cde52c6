"""Vectors of what single parties say to each other: conversations, blinded ids, buckets, positions, trees."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from he_processors.curve.interface import GROUP_ORDER
from nvflare_plugins.kinds.alignment.intersection import BlindingKey, Proofs, pack_block
from nvflare_plugins.kinds.bagging.model import SharedTree, message_bytes
from nvflare_plugins.kinds.federboost_vertical.tables import BucketBlock
from nvflare_plugins.kinds.vertical import messages
from nvflare_plugins.kinds.vertical.conversation import MAX_FRAGMENTS, ConversationStep, Flag, Fragment
from nvflare_plugins.kinds.vertical_inference.explanations import RowPositions
from nvflare_plugins.pooled.mediated.communicator import request_class
from tests.vectors import product_parties
from tests.vectors.drawn import Case, at, cut_and_longer, damages, drawn, flipped, word


def bits(text: str) -> messages.Bits:
    """Return a list of bits."""
    return messages.Bits.of(np.array([c == "1" for c in text], dtype=bool))


MESSAGES: tuple[messages.Message, ...] = (
    messages.PartySchema((100, 30), (16, 2), ("größe", "b")),
    messages.PartySchema((5,), (2, 3), ("a", "b"), ((), ("grün", "rot", "東京"))),
    messages.TrainingSetup(1, 40, 1000, drawn("public key", 20)),
    messages.TrainingSetup(0, 0, 1, b""),
    messages.TreeGradients(3, bits("101"), drawn("gradients", 30)),
    messages.MoreGradients(3, b""),
    messages.HistogramRequest(0, ()),
    messages.HistogramRequest(
        2, (messages.NodePartition(0, 1, 2, bits("1100110011")), messages.NodePartition(5, 11, 12, bits("")))
    ),
    messages.HistogramRequest(
        2,
        (messages.NodePartition(3, 7, 8, bits("101")),),
        (messages.OwnDivision(4, 9, 10), messages.OwnDivision(5, 11, 12)),
    ),
    messages.MoreSums(2),
    messages.HistogramAnswer(2, (1, 11), drawn("sums", 9), (5,)),
    messages.SplitRequest(2, (messages.OwnedSplit(0, 1, 7, True), messages.OwnedSplit(1, 0, -1, False))),
    messages.SplitRequest(2, (messages.OwnedSplit(3, 1, -1, False, (0, 2, 300)),)),
    messages.SplitAnswer(2, (bits("10"), bits("11111111"), bits("0"))),
    messages.DecisionRequest(1, (messages.PathQuery(0, 3, bits("110")),)),
    messages.DecisionAnswer((bits("1"), bits(""))),
    messages.Transfers(drawn("offer", 32), b""),
    messages.TransfersAnswer(drawn("other offer", 32), drawn("choices", 96)),
    messages.SealedRequest(2, 1, (3, 4), drawn("circuit", 40)),
    messages.SealedAnswer(2, drawn("scores", 16)),
)


def _steps() -> Iterator[Case]:
    fragments = (Fragment(0, False, b"ab"), Fragment(0, True, b""), Fragment(1, True, drawn("fragment", 40)))
    for flag in Flag:
        step = ConversationStep(flag, 9, 4, fragments if flag is Flag.MORE else ())
        yield f"step {flag.name}", "step", {"data": step.to_bytes().hex()}
    good = ConversationStep(Flag.MORE, 9, 4, fragments).to_bytes()
    changes = {
        **cut_and_longer(good),
        "magic": at(good, 0, b"VLBX"),
        "version": at(good, 4, b"\2"),
        "flag 0": at(good, 5, b"\0"),
        "flag 5": at(good, 5, b"\5"),
        "another number of fragments": flipped(good, 18),
        "too many fragments": at(good, 18, struct.pack("<I", MAX_FRAGMENTS + 1)),
        "last, or not, or 2": at(good, 30, b"\2"),
        "a fragment longer than there is": at(good, 31, b"\xff" * 8),
    }
    yield from damages("step", "step", {}, changes)


def _messages() -> Iterator[Case]:
    for number, message in enumerate(MESSAGES):
        data = messages.to_bytes(message)
        name = f"{type(message).__name__} {number}"
        yield name, "vertical message", {"data": data.hex()}
        changes = cut_and_longer(data)
        if number == 0:
            changes |= {
                "magic": at(data, 0, b"VLBX"),
                "version": at(data, 4, b"\1"),
                "type 0": at(data, 5, b"\0"),
                "type 16": at(data, 5, b"\x10"),
                "an alias twice": messages.to_bytes(messages.PartySchema((1,), (2, 2), ("a", "a"))),
                "no features": messages.to_bytes(messages.PartySchema((1,), (), ())),
                "an alias too few": messages.to_bytes(messages.PartySchema((1,), (2, 2), ("a",))),
                "no bins": messages.to_bytes(messages.PartySchema((1,), (0,), ("a",))),
                "alias that is no text": at(data, len(data) - 9 - 8, b"\xff"),
                "a category twice": messages.to_bytes(messages.PartySchema((1,), (2,), ("a",), (("x", "x"),))),
                "fewer categories than bins": messages.to_bytes(messages.PartySchema((1,), (2,), ("a",), (("x",),))),
                "a list too few": messages.to_bytes(messages.PartySchema((1,), (2, 2), ("a", "b"), ((),))),
            }
        elif isinstance(message, messages.SplitRequest):
            behind = len(data) - 4 - 2 * len(message.splits[-1].right_bins)
            changes["default direction 2"] = at(data, behind - 1, b"\2")
            changes["bin below -1"] = at(data, behind - 5, struct.pack("<i", -2))
        elif isinstance(message, messages.SplitAnswer):
            changes["bits behind the end of a list"] = data[:-1] + b"\2"
        elif isinstance(message, messages.SealedRequest):
            changes["step 3"] = at(data, 10, b"\3")
        elif isinstance(message, messages.Transfers):
            changes["an offer too long"] = messages.to_bytes(messages.Transfers(bytes(1025), b""))
        elif isinstance(message, messages.MoreGradients):
            changes["tree out of range"] = at(data, 6, struct.pack("<I", (1 << 24) + 1))
        yield from damages(name, "vertical message", {}, changes)


def _blinding() -> Iterator[Case]:
    items = [drawn(f"id {i}").hex() for i in range(3)] + [b"row 7".hex(), ""]
    domain, secrets = drawn("domain"), [word(f"blinding key {i}", GROUP_ORDER - 1) + 1 for i in range(2)]
    given = {"domain": domain.hex(), "secret": str(secrets[0])}
    yield "ids hashed", "blinded", {**given, "secret": "1", "items": items}
    yield "ids blinded", "blinded", {**given, "items": items}
    yield "ids under another domain", "blinded", {**given, "domain": drawn("other").hex(), "items": items}
    blinded = product_parties.FORMATS["blinded"]({**given, "items": items})["points"]
    again = {"domain": domain.hex(), "secret": str(secrets[1])}
    yield "blinded further", "blinded", {**again, "points": blinded, "do": "blind"}
    yield "unblinded", "blinded", {**given, "points": blinded, "do": "unblind"}
    for what, bad in {
        "neutral": "00" * 32,
        "negative": (2**255 - 20).to_bytes(32, "little").hex(),
        "above the prime": (2**255 - 18).to_bytes(32, "little").hex(),
        "odd": "01" + "00" * 31,
        "no square": "26948d35ca62e643e26a83177332e6b6afeb9d08e4268b650f1f5bbd8d81d371",
        "short": "00" * 31,
        "high bit": "ff" * 32,
    }.items():
        yield f"blinded: {what}", "blinded", {**given, "points": [blinded[0], bad], "do": "blind"}
    points = [bytes.fromhex(point) for point in blinded[:2]]
    for size, sent in ((4, points), (2, points), (1, [])):
        data = pack_block(sent, size)
        yield f"block of {len(sent)} in {size}", "block", {"data": data.hex(), "size": size}
    good = pack_block(points, 4)
    changes = {
        **cut_and_longer(good),
        "more points than places": at(good, 0, struct.pack("<I", 5)),
        "fewer points than there are": at(good, 0, struct.pack("<I", 1)),
        "something behind the points": at(good, len(good) - 1, b"\1"),
    }
    yield from damages("block", "block", {"size": 4}, changes)


class _Drawn:
    """A source whose bytes a name fixes."""

    def __init__(self, name: str) -> None:
        self._name, self._count = name, 0

    def bytes(self, n: int) -> bytes:
        self._count += 1
        return drawn(f"{self._name}, {self._count}", n)


def _chains() -> Iterator[Case]:
    domain, size = drawn("domain"), 4
    keys = [BlindingKey(domain, _Drawn(f"key of rank {rank}")) for rank in range(3)]
    committed = tuple(key.commitment() for key in keys)
    proofs = [Proofs(domain, committed, rank, key, _Drawn(f"nonce {rank}")) for rank, key in enumerate(keys)]
    common = keys[2].blind(keys[1].blind(keys[0].blind_items([b"row 1", b"row 2", b"row 3"])))
    given = {
        "domain": domain.hex(),
        "commitments": [one.hex() for one in committed],
        "first": 2,
        "number": 7,
        "common": [point.hex() for point in common],
        "size": size,
        "links": 2,
    }
    one = proofs[2].extend(b"", 2, 7, common, size)
    two = proofs[0].extend(one, 2, 7, keys[2].unblind(common), size)
    yield "chain of one link", "chain", {**given, "links": 1, "data": one.hex()}
    yield "chain of two links", "chain", {**given, "data": two.hex()}
    empty = proofs[2].extend(b"", 2, 7, [], size).hex()
    yield "chain without points", "chain", {**given, "links": 1, "common": [], "data": empty}
    for what, changed in {
        "another session": {"domain": drawn("other").hex()},
        "another first party": {"first": 0},
        "another block": {"number": 8},
        "commitments in another order": {"commitments": given["commitments"][::-1]},
        "common points in another order": {"common": given["common"][::-1]},
        "a common point less": {"common": given["common"][:2]},
    }.items():
        yield f"chain: {what}", "chain", {**given, "data": two.hex(), **changed}
    link, points = len(one), [two[4 + 32 * i : 36 + 32 * i] for i in range(3)]
    above = (int.from_bytes(two[-32:], "little") + GROUP_ORDER).to_bytes(32, "little")
    changes = {
        **cut_and_longer(two),
        "points in another order": at(two, 4, points[1] + points[0]),
        "a point twice": at(two, 4, points[1]),
        "the common points": at(two, 4, b"".join(common)),
        "the neutral element": at(two, link + 4, bytes(32)),
        "no element": at(two, link + 4, b"\xff" * 32),
        "a point less": at(two, 0, pack_block(points[:2], size)),
        "links in another order": two[link:] + two[:link],
        "another challenge": flipped(two, link - 64),
        "another response": flipped(two, link - 32),
        "response above the order": two[:-32] + above,
        "no proof": two[:-64] + bytes(64),
    }
    yield from damages("chain", "chain", given, changes)


def _tables() -> Iterator[Case]:
    block = BucketBlock((3, 200), np.array([[0, 2, 1], [199, 0, 7]], dtype=np.uint8)).to_bytes()
    given = {"rows": 3, "features": 2}
    yield "buckets", "buckets", {**given, "data": block.hex()}
    yield (
        "buckets of no row",
        "buckets",
        {
            "rows": 0,
            "features": 1,
            "data": BucketBlock((2,), np.zeros((1, 0), np.uint8)).to_bytes().hex(),
        },
    )
    changes = {
        **cut_and_longer(block),
        "magic": flipped(block, 0),
        "version": at(block, 4, b"\2"),
        "other rows": flipped(block, 5),
        "other features": flipped(block, 13),
        "no bucket": at(block, 15, b"\0"),
        "a bucket that is not there": at(block, 17, b"\3"),
    }
    yield from damages("buckets", "buckets", given, changes)
    told = RowPositions(
        np.array([1, 4], dtype=np.uint32),
        np.array([[0, 0, 1, 1], [0, 2, 0, 3]], dtype=np.uint32),
        np.array([[0, 3], [(1 << 32) - 1, 1], [2, 2]], dtype=np.uint32),
        np.zeros((0, 2), dtype=np.uint32),
    ).to_bytes()
    yield "positions", "positions", {"rows": 3, "data": told.hex()}
    grouped = RowPositions(
        np.array([1, 4], dtype=np.uint32),
        np.array([[0, 0, 1, 0], [0, 2, 0, 3]], dtype=np.uint32),
        np.array([[0, 3], [(1 << 32) - 1, 1], [2, 2]], dtype=np.uint32),
        np.array([[0, 2], [0, 3], [0, 65535]], dtype=np.uint32),
    ).to_bytes()
    yield "positions with groups", "positions", {"rows": 3, "data": grouped.hex()}
    groups = {
        "a group of a threshold": at(grouped, len(grouped) - 8, struct.pack("<I", 1)),
        "a group too large": at(grouped, len(grouped) - 4, struct.pack("<I", 1 << 16)),
        "a split without groups": at(grouped, 57, bytes(4)),
    }
    yield from damages("positions with groups", "positions", {"rows": 3}, groups)
    changes = {
        **cut_and_longer(told),
        "magic": flipped(told, 0),
        "other rows": flipped(told, 13),
        "features not in order": at(told, 21, told[25:29] + told[21:25]),
        "a feature that is not listed": at(told, 37, struct.pack("<I", 2)),
        "rank 0 without a group": at(told, 41, bytes(4)),
        "rank too large": at(told, 41, struct.pack("<I", 1 << 24)),
        "position too large": at(told, 61, struct.pack("<I", 1 << 24)),
    }
    yield from damages("positions", "positions", {"rows": 3}, changes)


def _trees() -> Iterator[Case]:
    nodes = {
        "left_children": [1, 3, -1, -1, -1],
        "right_children": [2, 4, -1, -1, -1],
        "split_indices": [1, 0, 0, 0, 0],
        "split_conditions": [0.5, -1.25, 0.1, 3.0, -1e30],
        "default_left": [1, 0, 0, 0, 0],
    }
    data = SharedTree.of(nodes).to_bytes(2)
    given = {"depth": 2, "features": 2}
    yield "tree", "tree", {**given, "data": data.hex()}
    yield (
        "tree of one leaf",
        "tree",
        {
            "depth": 0,
            "features": 1,
            "data": SharedTree.of({k: v[4:] for k, v in nodes.items()}).to_bytes(0).hex(),
        },
    )
    node = lambda i, field: 4 + 17 * i + {"left": 0, "right": 4, "feature": 8, "condition": 12, "default": 16}[field]  # noqa: E731
    changes = {
        **cut_and_longer(data),
        "no node": at(data, 0, bytes(4)),
        "eight nodes": at(data, 0, struct.pack("<I", 8)),
        "a circle": at(data, node(1, "left"), struct.pack("<i", 1)),
        "a child twice": at(data, node(0, "right"), struct.pack("<i", 1)),
        "a column that is not there": at(data, node(0, "feature"), struct.pack("<I", 2)),
        "default direction 2": at(data, node(0, "default"), b"\2"),
        "one child": at(data, node(2, "right"), struct.pack("<i", 3)),
        "a leaf with a column": at(data, node(3, "feature"), struct.pack("<I", 1)),
        "threshold that is no number": at(data, node(0, "condition"), struct.pack("<f", float("nan"))),
        "leaf too large": at(data, node(3, "condition"), struct.pack("<f", 2e30)),
        "something behind the nodes": at(data, len(data) - 1, b"\1"),
    }
    yield from damages("tree", "tree", given, changes)
    yield (
        "tree: too deep",
        "tree",
        {
            "depth": 1,
            "features": 2,
            "data": data[: message_bytes(1)].hex(),
        },
    )


def _xgboost() -> Iterator[Case]:
    for call, values in {
        "Allreduce": {
            "sequence_number": 300,
            "rank": 1,
            "send_buffer": b"\0" * 16,
            "data_type": 2,
            "reduce_operation": 2,
        },
        "Allgather": {"sequence_number": 1, "rank": 0, "send_buffer": b"x"},
        "AllgatherV": {"sequence_number": 2, "rank": 2, "send_buffer": b""},
        "Broadcast": {"sequence_number": 3, "rank": 1, "send_buffer": b"seed", "root": 0},
    }.items():
        data = request_class(call)(**values).SerializeToString(deterministic=True)
        yield f"call {call}", "call", {"call": call, "data": data.hex()}


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for part in (_steps, _messages, _blinding, _chains, _tables, _trees, _xgboost):
        yield from part()
