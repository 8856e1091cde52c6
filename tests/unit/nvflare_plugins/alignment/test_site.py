"""One site's part in an alignment job: from the policy to the file, or to an error that leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import JobResult, Silent, SiteContext
from nvflare_plugins.base.errors import JobAborted, PolicyRefusal
from nvflare_plugins.data.identity import load_ids
from nvflare_plugins.evidence.reader import read_log
from nvflare_plugins.flare.timeouts import LOCAL_WORK_S, exchange_deadline_s
from nvflare_plugins.kinds.alignment.align import align_site
from nvflare_plugins.kinds.alignment.job import FILE, Alignment, AlignmentJob, load_alignment, save_alignments
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.recipes.recipe import AlignmentRecipe
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.memory.alignments import AlignmentRegistry
from nvflare_plugins.wire.aggregation import Aggregator
from tests.support.alignment import TIMEOUT_S, party_names, policy_of
from tests.support.federation import DirectTransport, run_in_threads
from tests.support.refusals import refused_for

NAMES = party_names(2)
JOB = AlignmentJob(["people"])


def places(folder: Path, ids: list[list[object]], **policy: Any) -> list[SiteContext]:
    attempt = os.urandom(16)
    made = []
    for name, own in zip(NAMES, ids, strict=True):
        (folder / name).mkdir(parents=True, exist_ok=True)
        pd.DataFrame({"person": own, "x": 1.0}).to_parquet(folder / name / "people.parquet")
        data_sets = {"people": {"path": "people.parquet", "id": "person"}}
        of_party = policy_of(folder, name, data_sets=data_sets, **policy)
        made.append(
            SiteContext(name, NAMES, "job-1", attempt, folder / name / "runs", of_party, Identity.unsigned(name))
        )
    return made


def run(parties: list[SiteContext], job: AlignmentJob = JOB) -> list[JobResult | Exception]:
    contexts = dict(zip(NAMES, parties, strict=True))

    def take_part(site: str, transport: DirectTransport) -> JobResult:
        return align_site(job, contexts[site], transport, TIMEOUT_S, Silent())

    outcomes = run_in_threads(Aggregator(NAMES, parties[0].attempt, TIMEOUT_S), NAMES, take_part)
    return [outcomes[name] for name in NAMES]


def test_sites_end_with_positions_evidence_and_a_report(tmp_path):
    ids = [[5, 3, 9, 7], [7, 1, 3, 5]]
    parties = places(tmp_path, ids)
    outcomes = run(parties)
    assert len({outcome.hmac for outcome in outcomes}) == 1
    assert all(outcome.summary == {"data_sets": ["people"]} for outcome in outcomes), "the server learns no sizes"
    for context, own in zip(parties, ids, strict=True):
        found = load_alignment(context, "job-1", "people")
        assert [own[row] for row in found.positions] == [3, 5, 7]
        folder = context.runs / "job-1"
        record = RunRecord.read(folder)
        assert record.sections[0].rows == (("people", "4", "3"),) and record.profile == "psi"
        assert "Private alignment of rows" in (folder / "report.html").read_text()
        log = read_log(next((folder / "evidence").glob("*.evidence.jsonl")))
        assert log.completed and {part.what for part in log.parts} == {"BLINDED_IDS"}


def test_a_refused_job_leaves_no_result_and_says_so_in_the_evidence(tmp_path):
    parties = places(tmp_path, [[5, 3, 9, 7], [7, 1, 3, 5]], vertical={"min_intersection": 4})
    outcomes = run(parties)
    assert {type(outcome) for outcome in outcomes} == {PolicyRefusal, JobAborted}
    assert not list(tmp_path.rglob(FILE))
    for path in tmp_path.rglob("*.evidence.jsonl"):
        log = read_log(path)
        assert not log.completed and "min_intersection" in log.end["reason"]


def test_repeated_ids_end_the_job_before_anything_is_sent(tmp_path):
    parties = places(tmp_path, [[5, 5], [7, 1]])
    with refused_for("more than once"):
        align_site(JOB, parties[0], None, TIMEOUT_S, Silent())  # type: ignore[arg-type]


def test_one_site_alone_has_nobody_to_align_with(tmp_path):
    alone = dataclasses.replace(places(tmp_path, [[5], [7]])[0], sites=NAMES[:1])
    with pytest.raises(ConfigurationError, match="at least two"):
        align_site(JOB, alone, None, TIMEOUT_S, Silent())  # type: ignore[arg-type]


# -- what an alignment leaves, and what stops a later job from using it wrongly ----------------------------------------


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


# -- what a job may say ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"data_sets": []},
        {"data_sets": "train"},
        {"data_sets": ["a", "a"]},
        {"data_sets": [""]},
        {"data_sets": [1]},
        {"data_sets": ["a"], "deadline_s": -1},
        {"data_sets": ["a"], "deadline_s": float("nan")},
        {"data_sets": ["a"], "deadline_s": True},
        {"data_sets": ["a"], "profile": "plain"},
    ],
)
def test_other_jobs_are_refused(document):
    with pytest.raises(ConfigurationError):
        AlignmentJob.from_dict(document)


def test_the_deadline_leaves_room_for_a_block_and_its_transfer():
    assert exchange_deadline_s(AlignmentJob(["a"])) == LOCAL_WORK_S
    assert exchange_deadline_s(AlignmentJob(["a"], 5.0)) == 5.0


def test_two_sites_are_enough():
    assert AlignmentRecipe("align", data_sets=["a"]).min_clients == 2
    assert AlignmentRecipe("align", data_sets=["a"], sites=["x", "y", "z"]).min_clients == 3
