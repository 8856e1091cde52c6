"""Real jobs in one process: their evidence verifies, a leak ends them, their bytes are the planned ones."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ProtocolError, VeilBoostError
from nvflare_plugins.evidence.format import SERVER, export_name
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.evidence.reader import read_log
from nvflare_plugins.evidence.verification import Verification, verify
from nvflare_plugins.pages.report import write_report
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.plan import final_messages, message_bytes, round_messages, setup_messages, workload_of_job
from nvflare_plugins.pooled.processors import BUILT_IN
from nvflare_plugins.wire.envelope import Codec
from nvflare_plugins.wire.profiles import MaskedSums
from tests.support import federation
from tests.support.federation import Federation, succeed

FEATURES = 6


@pytest.fixture
def job() -> HorizontalJob:
    return HorizontalJob(
        "data",
        "y",
        {"objective": "binary:logistic", "max_depth": 3, "max_bin": 16, "eval_metric": ["auc", "logloss"]},
        num_rounds=3,
        evaluate_training=True,
        cuts="uniform",
        cut_bounds={f"f{i}": [-3.0, 3.0] for i in range(FEATURES)},
    )


class Run:
    """A job of three sites and a server that keeps evidence, as FLARE's server process does."""

    def __init__(self, folder: Path, job: HorizontalJob, monkeypatch: pytest.MonkeyPatch):
        self.exports = folder / "exports"
        self.federation = Federation(folder)
        rng = np.random.default_rng(5)
        frame = pd.DataFrame(rng.normal(size=(600, FEATURES)), columns=[f"f{i}" for i in range(FEATURES)])
        frame["y"] = (frame.f0 + frame.f1 * frame.f2 + rng.normal(size=600) > 0).astype(np.float32)
        self.federation.give_data("data", frame)
        run = self

        class RecordingAggregator(federation.Aggregator):
            def __init__(self, sites, attempt, deadline_s):
                path = run.exports / export_name(SERVER)
                run.log = EvidenceLog(path, SERVER, "job", attempt.hex(), job.profile, role="server")
                super().__init__(sites, attempt, deadline_s, run.log.transfer, run.log.signed_head)

        monkeypatch.setattr(federation, "Aggregator", RecordingAggregator)
        self.outcomes = self.federation.run(job)
        failed = any(isinstance(outcome, Exception) for outcome in self.outcomes.values())
        self.log.end("aborted" if failed else "completed")
        self.log.close()
        for site in self.federation.sites:
            shutil.copy(self.folder_of(site) / "evidence" / export_name(site), self.exports)

    def folder_of(self, site: str) -> Path:
        return self.federation.workspace(site) / "runs" / "job"

    def verify(self) -> Verification:
        return verify([self.exports])


@pytest.mark.parametrize(("profile", "word_bits"), [("plain", 32), ("masks", 32), *((name, 64) for name in BUILT_IN)])
def test_a_real_run_verifies_and_sends_what_was_planned(tmp_path, monkeypatch, job, profile, word_bits):
    job = HorizontalJob.from_dict({**job.to_dict(), "profile": profile, "word_bits": word_bits})
    run = Run(tmp_path, job, monkeypatch)
    succeed(run.outcomes)
    result = run.verify()
    assert result.sound, [attempt.failures for attempt in result.attempts]

    workload = workload_of_job(job, 600, FEATURES, 3, missing=False)
    planned: Counter = Counter()
    rounds = [m for number in range(job.num_rounds) for m in round_messages(workload, profile, is_first=number == 0)]
    for m in (*setup_messages(workload), *rounds, *final_messages(workload, profile)):
        planned[m.kind.name] += m.messages * message_bytes(m, profile)
    assert ("HISTOGRAM_METRIC" in planned) == (profile in ("plain", "masks"))
    sent: Counter = Counter()
    for message in read_log(run.exports / export_name("site-2")).messages:
        if message.direction == "sent" and message.kind in planned:
            sent[message.kind] += message.size
    assert sent == planned
    assert any(f"word bits {word_bits}" in note for note in result.attempts[0].notes)

    html = write_report(run.folder_of("site-1")).read_text()
    assert RunRecord.read(run.folder_of("site-1")).profile == profile
    assert "intact" in html and "gradient histograms" in html


def test_a_site_whose_program_would_send_in_clear_ends_the_job(tmp_path, monkeypatch, job):
    monkeypatch.setattr(MaskedSums, "codec", Codec.PLAIN)
    run = Run(tmp_path, job, monkeypatch)
    errors = [outcome for outcome in run.outcomes.values() if isinstance(outcome, ProtocolError)]
    assert errors and all("in clear" in str(error) for error in errors)
    result = run.verify()
    assert not result.sound
    [attempt] = result.attempts
    assert not any("LEAK" in text for text in attempt.failures), "the message must not have left the site"
    assert not any((run.folder_of(site) / "model.json").exists() for site in run.federation.sites)


def test_a_second_attempt_under_the_same_job_id_is_refused_in_words(tmp_path, job):
    sites = Federation(tmp_path)
    frame = pd.DataFrame(
        np.random.default_rng(6).normal(size=(90, FEATURES)), columns=[f"f{i}" for i in range(FEATURES)]
    )
    sites.give_data("data", frame.assign(y=(frame.f0 > 0).astype(np.float32)))
    succeed(sites.run(job))
    model = sites.model()
    outcomes = sites.run(job)
    assert all(isinstance(error, VeilBoostError) for error in outcomes.values())
    assert any("never overwritten: submit the job anew" in str(error) for error in outcomes.values())
    assert sites.model() == model
    for site in sites.sites:  # as the simulator calls all its jobs
        (sites.workspace(site) / "runs" / "job").rename(sites.workspace(site) / "runs" / "simulate_job")
    outcomes = sites.run(job, job_id="simulate_job")
    assert any("Rename the folder of that run" in str(error) for error in outcomes.values())
