"""One site's part in an alignment job: from the policy to the file, or to an error that leaves nothing behind."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.attempt.job_context import JobResult, Silent, SiteContext
from nvflare_plugins.base.errors import JobAborted, PolicyRefusal
from nvflare_plugins.evidence.reader import read_log
from nvflare_plugins.kinds.alignment.align import align_site
from nvflare_plugins.kinds.alignment.job import FILE, AlignmentJob, load_alignment
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.wire.aggregation import Aggregator
from tests.support.alignment import TIMEOUT_S, party_names, policy_of
from tests.support.federation import DirectTransport
from tests.support.refusals import refused_for
from tests.support.threads import in_threads

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
    aggregator = Aggregator(NAMES, parties[0].attempt, TIMEOUT_S)
    outcomes: dict[str, JobResult | Exception] = {}

    def take_part(context: SiteContext) -> None:
        try:
            outcomes[context.site] = align_site(
                job, context, DirectTransport(aggregator, context.site), TIMEOUT_S, Silent()
            )
        except VeilBoostError as error:
            outcomes[context.site] = error
            aggregator.abort(f"{context.site}: {error}")

    in_threads(take_part, parties)
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
