"""What the server receives, what is logged, and what lies in files: none of it holds what the sites must keep.

Each search is also run where it must find something, so that a search that finds nothing means something.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import logging
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from he_processors import masks as masks_module
from he_processors.bfv import BfvProcessor
from he_processors.errors import VeilBoostError
from nvflare_plugins.attempt import session as session_module
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.processors import BUILT_IN
from nvflare_plugins.wire.envelope import Codec, Frame, FrameType, Kind, unpack
from nvflare_plugins.wire.sums import ProtectedSums
from tests.support.examples import quick, slow
from tests.support.federation import Federation, succeed

PROFILES = [name for name in BUILT_IN if name != "plain"]
SMALL = 2.0**58  # a difference of uniform words is that small with probability 1/32

JOBS = {
    "depthwise": {"objective": "binary:logistic", "max_depth": 3},
    "lossguide": {"objective": "binary:logistic", "grow_policy": "lossguide", "max_leaves": 6, "max_depth": 0},
    "parallel_trees": {"objective": "binary:logistic", "num_parallel_tree": 3, "max_depth": 2, "eta": 1e-9},
    "classes": {"objective": "multi:softprob", "num_class": 2, "max_depth": 2},
    "growing_scales": {"objective": "reg:squarederror", "learning_rate": 30.0, "max_depth": 2},
    "adaptive_leaves": {"objective": "reg:absoluteerror", "max_depth": 2},
}


def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(90, 3)).astype(np.float32), columns=list("abc"))
    frame.iloc[::20] = np.nan
    return frame.assign(y=(np.nan_to_num(frame.a) > 0).astype(np.float32))


def job(params: dict, num_rounds: int = 3, **fields) -> HorizontalJob:
    return HorizontalJob("train", "y", {"max_bin": 16, **params}, num_rounds, evaluate_training=True, **fields)


@pytest.fixture
def federation(tmp_path) -> Federation:
    return Federation.of(tmp_path, train=table())


def record(federation: Federation, training: HorizontalJob, job_id: str = "job", **options) -> list[tuple[str, Frame]]:
    """Run a job and return every frame that the server received."""
    frames: list[tuple[str, bytes]] = []
    succeed(federation.run(training, job_id, frames=frames, **options))
    return [(site, unpack(data)) for site, data in frames]


# -- masks
# --------------------------------------------------------------------------------------------------------------


def masked_words(frames: list[tuple[str, Frame]]) -> dict[str, list[np.ndarray]]:
    """Return the masked payloads by site, of a retry only once."""
    found: dict[str, dict] = defaultdict(dict)
    for site, frame in frames:
        if frame.codec is Codec.MASKED and frame.payload:
            earlier = found[site].setdefault((frame.attempt, frame.counter), frame)
            assert earlier == frame, "a counter was used for two different messages"
    return {site: [np.frombuffer(f.payload, "<u8") for f in of_site.values()] for site, of_site in found.items()}


def reused(payloads: list[np.ndarray]) -> str | None:
    """Say how two payloads of one site show that they share a keystream; histograms are full of equal values."""
    words = np.concatenate(payloads)
    if np.unique(words).size != words.size:
        return "a word stands in two payloads"
    for one, other in itertools.combinations([p for p in payloads if p.size >= 16], 2):
        n = min(one.size, other.size)
        difference = np.abs((one[:n] - other[:n]).view(np.int64).astype(np.float64))
        if np.mean(difference < SMALL) > 0.5:
            return "two payloads differ by small numbers"
    return None


@pytest.mark.parametrize(
    "name",
    quick(JOBS, "growing_scales", "adaptive_leaves"),
)
def test_no_keystream_is_used_twice(federation, name):
    """Over all trees, over retries of every single message, and over a restart of the whole job."""
    frames = record(federation, job(JOBS[name]), "first", sends_twice=True)
    frames += record(federation, job(JOBS[name]), "restarted")
    if name == "growing_scales":
        assert any(frame.type is FrameType.RESCALE for _, frame in frames), "this job was to outgrow its scales"
    for site, payloads in masked_words(frames).items():
        assert len(payloads) > 60
        assert reused(payloads) is None, site


@pytest.mark.parametrize("forgotten", ["counter", "session"])
def test_a_reused_keystream_would_be_noticed(federation, monkeypatch, forgotten):
    if forgotten == "session":
        derive = masks_module.derive_key
        monkeypatch.setattr(
            masks_module, "derive_key", lambda secret, session_id, *rest: derive(bytes(32), b"always the same", *rest)
        )
    else:
        inform = masks_module._info
        monkeypatch.setattr(
            masks_module,
            "_info",
            lambda label, modulus: inform(dataclasses.replace(label, counter=0, phase="any phase"), modulus),
        )
    frames = record(federation, job(JOBS["depthwise"]), "first")
    frames += record(federation, job(JOBS["depthwise"]), "restarted")
    assert all(reused(payloads) for payloads in masked_words(frames).values())


def test_masks_inside_bfv_are_never_used_twice(federation, monkeypatch):
    inside: dict[int, list[np.ndarray]] = defaultdict(list)
    real = BfvProcessor.encrypt_residues

    def encrypt_residues(self, residues):
        inside[id(self)].append(residues.copy())
        return real(self, residues)

    monkeypatch.setattr(BfvProcessor, "encrypt_residues", encrypt_residues)
    record(federation, job(JOBS["lossguide"], profile="bfv"))
    assert len(inside) == 3
    for payloads in inside.values():
        words = np.concatenate(payloads)
        assert np.unique(words).size == words.size


def totals(frames: list[tuple[str, Frame]], *codecs: Codec) -> dict[int, np.ndarray]:
    """Add up each exchange as the server can."""
    sums: dict[int, np.ndarray] = {}
    for _, frame in frames:
        if frame.codec in codecs and frame.kind is not Kind.SCALE:  # SCALE is random in itself
            words = np.frombuffer(frame.payload[: len(frame.payload) - frame.tail], f"<u{frame.codec.word_bytes}")
            sums[frame.counter] = sums[frame.counter] + words if frame.counter in sums else words
    return sums


def revealed_sums(folder: Path, word_bits: int) -> float:
    """Return which part of the server's totals are the true sums, up to one constant per exchange."""
    frames = {}
    for profile in ("plain", "masks"):
        federation = Federation.of(folder / profile, train=table())
        training = job(JOBS["depthwise"], profile=profile, finest_exponent=-20, word_bits=word_bits)
        frames[profile] = record(federation, training)
    true = totals(frames["plain"], Codec.PLAIN, Codec.PLAIN_32)
    seen = totals(frames["masks"], Codec.MASKED, Codec.MASKED_32)
    assert true.keys() == seen.keys() and len(true) > 40
    assert (word_bits == 32) == any(frame.codec is Codec.MASKED_32 for _, frame in frames["masks"])
    vectors = [(true[c], seen[c]) for c in true if true[c].size > 1]
    same = [np.mean((seen - true)[1:] == (seen - true)[0]) for true, seen in vectors]
    return float(np.mean(same))


@pytest.mark.parametrize("word_bits", [64, 32])
def test_the_server_cannot_add_up_what_it_receives(tmp_path, word_bits):
    assert revealed_sums(tmp_path, word_bits) <= (0 if word_bits == 64 else 1e-3)  # by chance once in 2^32 words


@pytest.mark.parametrize("word_bits", [64, *slow(32)])
def test_a_sum_without_blinding_would_be_noticed(tmp_path, monkeypatch, word_bits):
    real = session_module.PairwiseMasks
    monkeypatch.setattr(session_module, "PairwiseMasks", lambda *arguments: real(*arguments, blinder=None))
    assert revealed_sums(tmp_path, word_bits) == 1


# -- plaintexts, keys, features, ids
# ------------------------------------------------------------------------------------

ROW_ID = "patient-XYZZY-%05d"
HEX_OR_TEXT = re.compile(r"[-+]?\d+\.?\d*(?:[eE][-+]?\d+)?")


def planted_table() -> pd.DataFrame:
    """Values with many digits in every cell, and an id column that is not a feature."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame((rng.normal(size=(120, 3)) * 1000).astype(np.float32), columns=list("abc"))
    frame["id"] = [ROW_ID % i for i in range(len(frame))]
    return frame.assign(y=(rng.normal(size=len(frame)) * 10 + 4242.4242).astype(np.float32))


class Witness:
    """Keeps what must stay secret while a job runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.numbers: list[np.ndarray] = []  # float64 and int64 that were to be protected, and their sums
        self.keys: set[bytes] = set()
        self._watch_sums(monkeypatch)
        self._watch_keys(monkeypatch)

    def _watch_sums(self, monkeypatch):
        real_sum, real_counts, real_integers = (
            ProtectedSums.sum,
            ProtectedSums.sum_counts,
            ProtectedSums._sum_integers,
        )

        def keep(*arrays):
            self.numbers.extend(np.array(a) for a in arrays if a is not None)

        def summed(sums, kind, values, *more):
            total = real_sum(sums, kind, values, *more)
            keep(values, total)
            return total

        def counted(sums, kind, counts):
            total = real_counts(sums, kind, counts)
            keep(counts, total)
            return total

        def integers(sums, kind, values, *more, **named):
            total, flags = real_integers(sums, kind, values, *more, **named)
            keep(values, total)
            return total, flags

        monkeypatch.setattr(ProtectedSums, "sum", summed)
        monkeypatch.setattr(ProtectedSums, "sum_counts", counted)
        monkeypatch.setattr(ProtectedSums, "_sum_integers", integers)

    def _watch_keys(self, monkeypatch):
        real_masks, real_share = session_module.PairwiseMasks, session_module.Session.share_secret
        real_tags, real_macs = session_module.SumTags, session_module.PairMacs

        def keep_masks(session_id, rank, pair_secrets, group_secret, *rest):
            made = real_masks(session_id, rank, pair_secrets, group_secret, *rest)
            self.keys |= {*pair_secrets.values(), group_secret, *made._pair_keys.values(), made._group_key}
            return made

        def keep_tags(*arguments):
            made = real_tags(*arguments)
            self.keys.add(made._key)
            return made

        def keep_macs(*arguments):
            made = real_macs(*arguments)
            self.keys |= set(made._keys.values())
            return made

        def share(session, secret):
            shared = real_share(session, secret)
            # A slice from the middle: the beginning is a header of the format.
            self.keys.add(shared[len(shared) // 2 :][:32])
            return shared

        monkeypatch.setattr(session_module, "PairwiseMasks", keep_masks)
        monkeypatch.setattr(session_module, "SumTags", keep_tags)
        monkeypatch.setattr(session_module, "PairMacs", keep_macs)
        monkeypatch.setattr(session_module.Session, "share_secret", share)

    def words(self) -> np.ndarray:
        """Return the 64-bit patterns of all secret numbers but those with many zeros, which could stand anywhere."""
        patterns = [np.ascontiguousarray(a).view(np.uint64).ravel() for a in self.numbers]
        words = np.unique(np.concatenate(patterns))
        octets = words.view(np.uint8).reshape(-1, 8)
        return words[((octets != 0) & (octets != 255)).sum(axis=1) >= 3]

    def texts(self) -> set[str]:
        """Return how the secret numbers would be printed."""
        return {text for a in self.numbers for text in map(repr, a.ravel().tolist()) if len(text) >= 10}


def among(found: np.ndarray, patterns: np.ndarray) -> np.ndarray:
    """Return which words have one of a few patterns. Shapes: both: uint[n]; a table of upper halves sorts most out."""
    half = np.uint8(8 * found.itemsize - 16)
    upper = np.zeros(1 << 16, dtype=bool)
    upper[patterns >> half] = True
    hits = upper[found >> half]
    hits[hits] = np.isin(found[hits], patterns)
    return hits


def contains_numbers(data: bytes, words: np.ndarray) -> bool:
    """Search 64-bit patterns at every position, two of them one after the other or with one number between.

    One alone is no sign: float32 values have three bytes or so that are not zero, and the headers of formats, in which
    zeros are many, hold such a pattern once in some thousand runs. Numbers that are sent stand in rows.
    """
    for offset in range(8):
        shifted = data[offset:]
        hits = among(np.frombuffer(shifted, "<u8", len(shifted) // 8), words)
        if (hits[1:] & hits[:-1]).any() or (hits[2:] & hits[:-2]).any():
            return True
    return False


def spellings(secret: bytes) -> list[bytes]:
    return [secret, secret.hex().encode(), base64.b64encode(secret)[:-4], repr(secret)[2:-1].encode()]


def watched_run(tmp_path, monkeypatch, caplog, profile: str):
    caplog.set_level(logging.DEBUG)
    witness = Witness(monkeypatch)
    federation = Federation.of(tmp_path, train=planted_table())
    params = {"objective": "reg:squarederror", "max_bin": 8, "max_depth": 2, "verbosity": 2}
    training = HorizontalJob(
        "train", "y", params, 6, profile, evaluate_training=True, features=list("abc"), checkpoint_every=1
    )
    frames: list[tuple[str, bytes]] = []
    succeed(federation.run(training, frames=frames))
    return federation, witness, [data for _, data in frames]


@pytest.mark.usefixtures("every_report")
@pytest.mark.parametrize("profile", quick([*PROFILES, "plain"], "masks", "bfv", "plain"))
def test_neither_server_nor_logs_nor_files_hold_a_secret(tmp_path, monkeypatch, caplog, capfd, profile):
    federation, witness, frames = watched_run(tmp_path, monkeypatch, caplog, profile)
    words = witness.words()
    assert words.size > 300
    # In clear the search must succeed: it then means something that it fails under the other profiles.
    assert any(contains_numbers(unpack(data).payload, words) for data in frames) == (profile == "plain")
    received = b"".join(frames)
    printed = "".join(capfd.readouterr())
    logs = caplog.text + printed
    files = {p: p.read_bytes() for s in federation.sites for p in federation.workspace(s).rglob("*") if p.is_file()}
    kept = {p: data for p, data in files.items() if p.name != "train.parquet"}
    kinds = {path.name for path in kept}
    assert {"model.json", "run.json", "veilboost_memory.sqlite"} <= kinds and logs

    assert len(witness.keys) >= 8
    for key in witness.keys:
        for spelling in spellings(key):
            assert spelling not in received and spelling not in logs.encode()
            assert not any(spelling in data for data in kept.values())

    # Sums are known to every site and stand in its model; elsewhere they have no business.
    frame = planted_table()
    features = frame[list("abc")].to_numpy()
    secret_texts = witness.texts() | {repr(float(v)) for v in features.ravel()} | {str(v) for v in features.ravel()}
    secret_texts |= {str(v) for v in frame.y} | {repr(float(v)) for v in frame.y}
    label_mean = frame.y.mean()
    for name, text in [("logs", logs), *((p.name, data.decode(errors="replace")) for p, data in kept.items())]:
        if name in ("model.json", "cuts.json") or name.startswith("checkpoint"):
            continue
        assert not secret_texts & set(HEX_OR_TEXT.findall(text)), name
        assert f"{label_mean:.2f}" not in text, name
        assert "XYZZY" not in text, name
    assert b"XYZZY" not in received
    rows = np.concatenate([features.ravel(), frame.y.to_numpy()]).view("<u4")
    binary = [data for path, data in kept.items() if path.suffix in (".u64", "") or path.name == "key"]
    for data in filter(None, [received, *binary] if profile != "plain" else binary):
        for offset in range(min(4, len(data))):
            n = (len(data) - offset) // 4
            hits = among(np.frombuffer(data, "<u4", n, offset), rows).sum()
            # Uniform bytes hit one of 480 patterns with probability 480 / 2^32 per position.
            assert hits <= 5 + 4 * n * rows.size / 2**32


def test_files_that_hold_secrets_are_private(tmp_path, monkeypatch, caplog):
    federation, _, _ = watched_run(tmp_path, monkeypatch, caplog, "plain")
    for site in federation.sites:
        for path in federation.workspace(site).rglob("*"):
            is_secret = "veilboost_registry" in path.parts or path.name.endswith(".salts")
            if path.is_file() and is_secret:
                assert path.stat().st_mode & 0o077 == 0, path.name


# -- errors
# -------------------------------------------------------------------------------------------------------------

MARK = "7351.9375"  # exact in float32: no rounding changes how it would be printed
BAD_DATA = {
    "infinite": lambda f: f.assign(a=f.a.where(f.a.index != 3, np.inf)),
    "beyond_float32": lambda f: f.assign(a=f.a.astype(float).where(f.a.index != 3, 7.3519375e39)),
    "text": lambda f: f.assign(a=f.a.astype(str).where(f.a.index != 3, f"secret {MARK}")),
    "label_missing": lambda f: f.assign(y=f.y.where(f.y.index != 3, np.nan)),
    "label_out_of_range": lambda f: f.assign(y=f.y.where(f.y.index != 3, float(MARK))),
    "label_text": lambda f: f.assign(y=f.y.astype(str).where(f.y.index != 3, f"secret {MARK}")),
    "category": lambda f: f.assign(c=np.where(f.index == 3, f"secret {MARK}", "x")),
    "negative_weight": lambda f: f.assign(b=-float(MARK)),
    "all": lambda f: f.iloc[:0],
}


@pytest.mark.parametrize("what", BAD_DATA)
def test_errors_quote_no_value_and_no_row(tmp_path, caplog, what):
    caplog.set_level(logging.DEBUG)
    federation = Federation(tmp_path)
    good = table().fillna(float(MARK))
    federation.give_data("train", good)
    fields: dict = {"features": ["a", "c"]} if what == "category" else {}
    fields |= {"weight": "b"} if what == "negative_weight" else {}
    fields |= {"categories": {"c": ["x", "y"]}, "unknown_category_is_missing": False} if what == "category" else {}
    if what == "category":
        federation.give_data("train", good.assign(c="x"))
    bad = BAD_DATA[what](good.iloc[:30])
    bad.to_parquet(federation.workspace("site-2") / "train.parquet", index=False)
    outcomes = federation.run(job({"objective": "binary:logistic"}, 1, **fields))
    assert all(isinstance(error, VeilBoostError) for error in outcomes.values()), outcomes
    said = caplog.text + "".join(map(str, outcomes.values()))
    for evidence in tmp_path.rglob("*.jsonl"):
        said += evidence.read_text()
    assert MARK not in said and "secret" not in said and "7.35" not in said


def test_evidence_names_no_row_count_of_a_site(federation):
    """How many rows a site holds is a private sum: counts of values per message follow from the job alone."""
    parts = [np.arange(7), np.arange(7, 60), np.arange(60, 90)]
    federation.give_data("train", table(), parts)
    succeed(federation.run(job(JOBS["depthwise"])))
    logs = [
        [json.loads(line) for line in (federation.workspace(s) / f"runs/job/evidence/{s}.evidence.jsonl").open()]
        for s in federation.sites
    ]
    shapes = [[(r["kind"], r["n_values"], r["size"]) for r in log if r["type"] == "message"] for log in logs]
    assert shapes[0] == shapes[1] == shapes[2]
