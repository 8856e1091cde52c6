"""What an alignment leaves at a site, and what stops a later job from using it wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.data.identity import load_ids
from nvflare_plugins.kinds.alignment.job import FILE, Alignment, load_alignment, save_alignments
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.memory.alignments import AlignmentRegistry
from tests.support.alignment import policy_of
from tests.support.refusals import refused_for

SITES = ("party-a", "party-b")
FRAME = pd.DataFrame({"id": ["q", "a", "z", "m"], "x": [0.0, 1.0, 2.0, 3.0]})


@pytest.fixture
def context(tmp_path: Path) -> SiteContext:
    (tmp_path / "party-a").mkdir()
    FRAME.to_csv(tmp_path / "party-a" / "train.csv", index=False)
    policy = policy_of(tmp_path, "party-a", data_sets={"train": {"path": "train.csv", "id": "id"}})
    return SiteContext("party-a", SITES, "now", b"a" * 16, tmp_path / "runs", policy, Identity.unsigned("party-a"))


def save(context: SiteContext, positions: object = (1, 3, 0), **changes: object) -> Path:
    fingerprint = AlignmentRegistry.open(context.policy).fingerprint(load_ids(context.policy.data_set("train")))
    facts = {"data_set": "train", "n_rows": 4, "fingerprint": fingerprint, "proof": b"p" * 32, **changes}
    folder = context.runs / "job"
    folder.mkdir(parents=True, exist_ok=True)
    alignment = Alignment(positions=np.asarray(positions), **facts)  # type: ignore[arg-type]
    return save_alignments(folder, "job", "party-a", SITES, [alignment])


def test_a_saved_alignment_comes_back_and_is_private(context):
    path = save(context)
    assert path.stat().st_mode & 0o777 == 0o600
    found = load_alignment(context, "job", "train")
    assert found.positions.tolist() == [1, 3, 0] and found.proof == b"p" * 32 and found.n_common == 3
    assert found.take(FRAME["id"].to_numpy()).tolist() == ["a", "m", "q"]
    assert found.take(FRAME[["x"]].to_numpy()).tolist() == [[1.0], [3.0], [0.0]]
    assert not any(name.encode() in path.read_bytes() for name in ("party-b-id", '"q"', '"z"'))


def test_tables_of_another_length_are_refused(context):
    save(context)
    with refused_for("another number of rows"):
        load_alignment(context, "job", "train").take(np.zeros(5))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda frame: frame.iloc[::-1], id="another order"),
        pytest.param(lambda frame: frame.iloc[:3], id="a row less"),
        pytest.param(lambda frame: frame.assign(id=["q", "a", "z", "n"]), id="another id"),
    ],
)
def test_changed_rows_are_refused(context, change):
    save(context)
    change(FRAME).to_csv(context.policy.data_set("train").path, index=False)
    with refused_for("not those that job job aligned"):
        load_alignment(context, "job", "train")


def test_changed_features_do_not_matter(context):
    save(context)
    FRAME.assign(x=9.0, y=1.0).to_csv(context.policy.data_set("train").path, index=False)
    assert load_alignment(context, "job", "train").n_common == 3


def test_unknown_jobs_and_data_sets(context):
    with pytest.raises(ConfigurationError, match="no alignment of a job job"):
        load_alignment(context, "job", "train")
    save(context)
    with pytest.raises(ConfigurationError, match="did not align a data set 'test'"):
        load_alignment(context, "job", "test")
    with pytest.raises(ConfigurationError, match="a job id holds only"):
        load_alignment(context, "../job", "train")
    (context.runs / "copy").mkdir()
    (context.runs / "copy" / FILE).write_bytes((context.runs / "job" / FILE).read_bytes())
    with pytest.raises(ConfigurationError, match="another job or site"):
        load_alignment(context, "copy", "train")


def test_a_data_set_that_left_the_policy_is_refused(context):
    save(context, data_set="gone")
    with pytest.raises(PolicyRefusal):
        load_alignment(context, "job", "gone")


def test_other_sites_are_refused(context):
    save(context)
    other = SiteContext(
        "party-a", ("party-a", "party-c"), "now", context.attempt, context.runs, context.policy, context.identity
    )
    with pytest.raises(ConfigurationError, match="other sites"):
        load_alignment(other, "job", "train")


@pytest.mark.parametrize("positions", [[1, 1], [0, 4], [-1, 0], [0.0, 1.0], [[0, 1]]])
def test_positions_that_are_none_are_refused(context, positions):
    save(context, positions)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_alignment(context, "job", "train")


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:100], lambda data: b"x" * 50, lambda data: data[50:]]
)
def test_damaged_files_are_refused(context, damage):
    path = save(context)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_alignment(context, "job", "train")


@pytest.mark.parametrize("lost", ["format", "site", "sites", "data_sets"])
def test_headers_must_be_whole(context, lost):
    path = save(context)
    with np.load(path) as stored:
        arrays = dict(stored)
    header = json.loads(arrays["header"].tobytes())
    del header[lost]
    np.savez(path, **{**arrays, "header": np.frombuffer(json.dumps(header).encode(), np.uint8)})
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_alignment(context, "job", "train")
