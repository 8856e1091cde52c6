"""Damaged, foreign and hostile files and messages of vertical jobs: a value or a refusal in words, no traceback."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from he_processors.errors import ConfigurationError, ProtocolError, VeilBoostError
from nvflare_plugins.data.declaration import VerticalRules
from nvflare_plugins.kinds.alignment.job import Alignment, AlignmentJob, _read, save_alignments
from nvflare_plugins.kinds.vertical.guards import Guard
from nvflare_plugins.kinds.vertical.job import VerticalJob
from nvflare_plugins.kinds.vertical.model import (
    ActivePart,
    PartyColumns,
    PassivePart,
    PrivateSplit,
    merge,
    table_to_json,
)
from nvflare_plugins.kinds.vertical_inference.explanations import Explainer, RowPositions
from nvflare_plugins.kinds.vertical_inference.job import InferenceJob
from nvflare_plugins.kinds.vertical_inference.site import _table
from nvflare_plugins.site.memory.alignments import AlignmentRegistry
from nvflare_plugins.site.memory.budgets import PredictionBudget
from nvflare_plugins.site.memory.released import ReleasedSums
from nvflare_plugins.site.memory.store import RELEASED_SUMS, Memory, counted, read_arrays, save_counts
from nvflare_plugins.site.policy import SitePolicy
from tests.support.vertical_federation import Joined, federate

ODD = [
    None,
    True,
    0,
    -1,
    1.5,
    1e308,
    1e999,
    float("nan"),
    10**30,
    -(2**63),
    "",
    "a",
    "1",
    "1e9",
    "1e999",
    "nan",
    "9" * 5000,
    "\ud800",
    "\0",
    [],
    [1],
    [1, 2],
    [[]],
    {},
    {"a": 1},
    [None],
    "x" * 300,
]
IDS = [f"row {number}" for number in range(40)]


def mutated(value: object, draw: random.Random) -> object:
    """Return a JSON value with parts of it replaced, dropped or added."""
    if draw.random() < 0.12:
        return draw.choice(ODD)
    if isinstance(value, dict):
        kept = {name: mutated(of, draw) if draw.random() < 0.3 else of for name, of in value.items()}
        return {name: of for name, of in kept.items() if draw.random() > 0.03}
    if isinstance(value, list):
        parts = [mutated(of, draw) if draw.random() < 0.3 else of for of in value]
        return parts + [draw.choice(ODD)] * (draw.random() < 0.1)
    return draw.choice(ODD) if draw.random() < 0.4 else value


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Return bytes of which some are cut off or changed."""
    if draw.random() < 0.2:
        return content[: draw.randrange(len(content) + 1)]
    data = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 5, 20])):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def npz(save: Callable[..., None] = np.savez, **arrays: object) -> bytes:
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(3))
    return file.getvalue()


# -- files of a site's own --------------------------------------------------------------------------------------------


def test_arrays_are_read_as_they_were_written(tmp_path):
    arrays = {
        "a": np.arange(5, dtype=np.uint64),
        "b": np.zeros((0, 64), np.int32),
        "c": np.float32([[1, np.nan]]),
        "d": np.array(3.5),
        "e": np.array([True, False]),
    }
    (tmp_path / "f.npz").write_bytes(npz(**arrays))
    found = read_arrays(tmp_path / "f.npz")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].flags.writeable
        np.testing.assert_array_equal(found[name], array)
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "none.npz")


@pytest.fixture
def ledger(tmp_path) -> ReleasedSums:
    ledger = ReleasedSums(Memory(tmp_path, "site-1"), "data")
    Guard(VerticalRules(), ledger, IDS, enforce=False).admit_root()
    return ledger


def use(ledger: ReleasedSums) -> None:
    guard = Guard(VerticalRules(min_rows_per_node=1), ledger, IDS)
    guard.admit_root()
    guard.exposure()


FOREIGN: Mapping[str, Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]] = {
    "float_keys": lambda of: {"keys": of["keys"].astype("<f4")},
    "no_number": lambda of: {"share": of["share"] * np.float32(np.nan)},
    "below_none": lambda of: {"sums": of["sums"] - 9},
    "split_bits_below_none": lambda of: {"split_bits": of["split_bits"] - 1},
    "too_few": lambda of: {"sums": of["sums"][1:]},
    "half_a_fingerprint": lambda of: {"fingerprints": of["fingerprints"][:-1]},
    "a_set_more": lambda of: {"sizes": np.append(of["sizes"], 1)},
    "more": lambda of: {"more": np.arange(3)},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_ledger_of_sums_is_refused_with_the_remedy(tmp_path, ledger, name):
    arrays = ledger.read().arrays()
    with Memory(tmp_path, "site-1").transaction() as db:
        db.execute("DELETE FROM row_counts")
        save_counts(db, RELEASED_SUMS, counted("data"), {**arrays, **FOREIGN[name](arrays)})
    with pytest.raises(ConfigurationError, match="Restore it from a backup"):
        use(ledger)


def policy_in(folder: Path) -> SitePolicy:
    return SitePolicy.from_dict({"registry": "registry"}, workspace=folder, site="site-1")


def test_damaged_files_are_read_or_refused(tmp_path):
    """The memory of a site, and alignments."""
    registry = AlignmentRegistry.open(policy_in(tmp_path))
    registry.reserve({"data": [b"a", b"b"]}, "job", ("site-1", "site-2"))
    PredictionBudget(policy_in(tmp_path), "data").charge(IDS)
    memory = Memory.open(policy_in(tmp_path))
    Guard(VerticalRules(), ReleasedSums(memory, "data"), IDS, enforce=False).admit_root()
    here = SimpleNamespace(site="site-1", sites=("site-1", "site-2"))
    save_alignments(tmp_path, "job", here.site, here.sites, [Alignment("data", np.arange(5), 9, "f", b"p")])

    def remember() -> None:
        PredictionBudget(policy_in(tmp_path), "data").check(IDS)
        use(ReleasedSums(Memory.open(policy_in(tmp_path)), "data"))
        AlignmentRegistry.open(policy_in(tmp_path)).describe()

    uses = {
        memory.path: remember,
        tmp_path / "alignment.npz": lambda: _read(tmp_path / "alignment.npz", here, "job"),
    }
    draw = random.Random(1)
    for path, read in uses.items():
        content = path.read_bytes()
        for change in (*(damaged(content, draw) for _ in range(120)), b"", npy(), b'{"version": 1, "runs": 5}', b"[]"):
            path.write_bytes(change)
            with suppress(VeilBoostError):
                read()
        path.write_bytes(content)
        read()


# -- messages of peers ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> tuple[ActivePart, PassivePart, np.ndarray]:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(60, 4)).astype(np.float32)
    joined = Joined(features, (features.sum(axis=1) > 0).astype(np.float32), (2, 2))
    outcome = federate(joined, {"max_depth": 3, "max_bin": 8}, 2)
    (party,) = outcome.parties
    aliases = party.schema.aliases
    active = ActivePart(outcome.result.model, ("a", "b"), (PartyColumns(party.name, aliases),))
    return active, PassivePart(outcome.passives[0].table, aliases, aliases), features


def test_any_table_is_merged_or_refused(model):
    active, passive, _ = model
    honest = json.loads(table_to_json(passive.table, passive.aliases))
    draw = random.Random(2)
    documents = [json.dumps(mutated(honest, draw)).encode(errors="surrogatepass") for _ in range(800)]
    for data in (*documents, b"", b"\xff", b"[" * 100_000, b"9" * 5000):
        with suppress(ProtocolError, ConfigurationError):
            merge(active.booster, 2, [(2, _table(data, passive.aliases))])


def test_a_threshold_that_is_a_list_is_refused():
    table = {(0, 0): PrivateSplit(0, np.float32(1), True, (-1, False))}
    document = json.loads(table_to_json(table, ("f0",)))
    document["splits"][0][3] = []
    with pytest.raises(ProtocolError, match="not of the expected form"):
        _table(json.dumps(document).encode(), ("f0",))


def test_any_positions_are_explained_or_refused(model):
    active, passive, features = model
    honest = RowPositions.of(passive, features[:, 2:]).to_bytes()
    draw = random.Random(3)
    site = active.parties[0].site
    for data in (honest, *(damaged(honest, draw) for _ in range(150))):
        with suppress(ProtocolError, ConfigurationError):
            Explainer(active, features[:, :2], {site: RowPositions.from_bytes(data, len(features))})


def test_positions_whose_splits_name_a_feature_while_none_is_listed_are_refused(model):
    _active, passive, features = model
    told = RowPositions.of(passive, features[:, 2:])
    nothing = RowPositions(told.features[:0], told.splits * np.uint32([1, 1, 0, 1]), told.positions[:, :0], told.groups)
    with pytest.raises(ProtocolError, match="do not list"):
        RowPositions.from_bytes(nothing.to_bytes(), len(features))


# -- jobs -------------------------------------------------------------------------------------------------------------

JOBS = {
    VerticalJob: {
        "active": "a",
        "data_set": "d",
        "label": "y",
        "params": {"max_depth": 3},
        "num_rounds": 3,
        "profile": "paillier",
        "key_bits": 3072,
        "preset": "exact",
        "features": {"a": ["x"]},
        "label_classes": ["a", "b"],
        "alignment": "first",
        "early_stopping_rounds": None,
        "resume_from": "j",
        "deadline_s": 0.0,
    },
    InferenceJob: {
        "model": "m",
        "action": "predict",
        "data_set": "d",
        "rows": [0, 5],
        "rounds": [0, 2],
        "alignment": "first",
        "file_format": "csv",
        "batch_rows": 100,
        "deadline_s": 1.0,
    },
    AlignmentJob: {"data_sets": ["a", "b"], "deadline_s": 1},
}


@pytest.mark.parametrize("kind", JOBS)
def test_any_document_is_a_job_or_refused(kind):
    draw = random.Random(4)
    for document in (JOBS[kind], None, [], {1: 2}, *(mutated(JOBS[kind], draw) for _ in range(600))):
        try:
            job = kind.from_dict(document)
        except ConfigurationError:
            continue
        assert kind.from_dict(json.loads(json.dumps(job.to_dict()))).to_dict().keys() == job.to_dict().keys()


@pytest.mark.parametrize("value", ["frist", "First", "FIRST", "fist", "firsst", "../first", "", 5, "a b", ".."])
def test_a_misspelt_alignment_is_refused_by_the_job(value):
    """It was taken for the id of a job, which the sites then did not find."""
    for kind in (VerticalJob, InferenceJob):
        with pytest.raises(ConfigurationError, match="alignment"):
            kind.from_dict({**JOBS[kind], "alignment": value})


@pytest.mark.parametrize("value", [None, "first", "simulate_job", "62f3ab1c-0b7c-4f0e-9b7a-0d7e3cf4b7d1", "job-1"])
def test_alignments_that_may_be(value):
    for kind in (VerticalJob, InferenceJob):
        assert kind.from_dict({**JOBS[kind], "alignment": value}).alignment == value
