"""Vertical jobs, alignments and predictions that fail: sites remember what was told, no less and no more."""

from __future__ import annotations

import errno
import json

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.flare.executor import error_text
from nvflare_plugins.growth.sampling import XGBoostRandom, sampled_rows
from nvflare_plugins.kinds.alignment.align import align_site
from nvflare_plugins.kinds.alignment.job import AlignmentJob
from nvflare_plugins.kinds.vertical import active_party, context, model
from nvflare_plugins.kinds.vertical import passive_party as passive
from nvflare_plugins.kinds.vertical.histogram_maker import HistogramMaker
from nvflare_plugins.kinds.vertical.messages import DecisionRequest
from nvflare_plugins.kinds.vertical_inference import site as inference_site
from nvflare_plugins.site.memory.budgets import PredictionBudget
from nvflare_plugins.site.memory.registry import Registry
from nvflare_plugins.site.memory.released import ReleasedSums
from nvflare_plugins.wire.envelope import Kind
from tests.integration.test_vertical_inference import Case, make_case
from tests.support.examples import slow
from tests.support.federation import Parties, dies_at, succeed
from tests.support.memories import changed, memory_in, states, told
from tests.support.vertical_federation import first_difference
from tests.support.vertical_jobs import PARAMS, central, federation, job, merged, run, table


@pytest.fixture
def parties(tmp_path) -> Parties:
    return federation(tmp_path, n_rows=150)


def remembered(parties: Parties) -> dict[str, int]:
    """Return how many runs each site's registry remembers."""
    return {site: len(states(parties.workspace(site), site)) for site in parties.sites}


def predictions_charged(parties: Parties, site: str) -> bool:
    return bool(
        told(memory_in(parties.workspace(site), site), "SELECT 1 FROM row_counts WHERE purpose = 'predictions'")
    )


NOBODY, EVERYBODY = dict.fromkeys(("site-1", "site-2", "site-3"), 0), dict.fromkeys(("site-1", "site-2", "site-3"), 1)


# -- training ---------------------------------------------------------------------------------------------------------


def test_a_damaged_ledger_at_one_party_leaves_no_reservation_at_any(parties):
    memory = memory_in(parties.workspace("site-3"), "site-3")
    with ReleasedSums(memory, "data").charging() as released:
        released.enter(np.arange(5, dtype=np.uint64))
    changed(memory, "UPDATE array_parts SET content = x'00'")
    outcomes = run(parties, job())
    assert "Restore it from a backup" in str(outcomes["site-3"]), outcomes
    assert remembered(parties) == NOBODY


def test_a_key_that_cannot_be_made_leaves_no_reservation(parties, monkeypatch):
    def fails(*of, **more):
        raise ConfigurationError("no key")

    monkeypatch.setattr(active_party, "open_owner", fails)
    assert "no key" in str(run(parties, job())["site-1"])
    assert remembered(parties) == NOBODY


def test_what_was_told_stays_remembered(parties, monkeypatch):
    def fails(self, request):
        raise ConfigurationError("no sums")

    monkeypatch.setattr(passive.PassiveParty, "_histograms", fails)
    assert "no sums" in str(run(parties, job(), notices_death=True)["site-2"])
    assert remembered(parties) == EVERYBODY


def test_a_disk_without_room_for_the_reservation_cancels_those_of_the_other_data_sets(parties, monkeypatch):
    honest = Registry.reserve

    def full(self, wanted, **more):
        if wanted.data_set.name == "held" and self._site == "site-2":
            raise OSError(28, "No space left on device")
        return honest(self, wanted, **more)

    monkeypatch.setattr(Registry, "reserve", full)
    outcomes = run(parties, job(eval_data_set="held"))
    assert all(isinstance(outcome, (VeilBoostError, OSError)) for outcome in outcomes.values())
    assert remembered(parties) == NOBODY


def test_evaluation_rows_are_charged_when_they_are_first_asked_for(parties, monkeypatch):
    honest = passive.PassiveParty.answer

    def fails_before_predicting(self, request):
        if isinstance(request, DecisionRequest):
            raise ConfigurationError("stopped there")
        assert not predictions_charged(parties, "site-2") and not predictions_charged(parties, "site-3")
        return honest(self, request)

    monkeypatch.setattr(passive.PassiveParty, "answer", fails_before_predicting)
    outcomes = run(parties, job(eval_data_set="held"))
    assert any("stopped there" in str(outcome) for outcome in outcomes.values()), outcomes
    assert predictions_charged(parties, "site-2") or predictions_charged(parties, "site-3")


def test_a_job_lost_before_its_first_evaluation_charges_no_evaluation_row(parties):
    lost = run(parties, job(eval_data_set="held"), tamper={"site-2": dies_at(Kind.CONVERSATION, 3)}, notices_death=True)
    assert all(isinstance(outcome, Exception) for outcome in lost.values())
    assert not predictions_charged(parties, "site-3")


# -- which rows a tree sampled ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_report")
def test_the_public_seed_does_not_tell_which_rows_a_tree_sampled(parties, monkeypatch):
    """A passive party that knows the few rows of a tree reads from the tree's nodes which of them have equal labels."""
    seen = []
    honest = HistogramMaker.sum_bins

    def spy(self, *of):
        sums = honest(self, *of)
        if not seen or seen[-1] is not self._pairs._pairs:
            seen.append(self._pairs._pairs)
        return sums

    monkeypatch.setattr(HistogramMaker, "sum_bins", spy)
    params = {**PARAMS, "subsample": 0.3, "seed": 7}
    succeed(run(parties, job(params=params, num_rounds=3)))
    sampled = [(pairs[:, 1] != 0) for pairs in seen]  # under `plain` hessians show what nobody sees under encryption
    twister = XGBoostRandom(7)
    twister.draw()  # for columns
    guesses = [sampled_rows(150, np.float32(0.3), twister.draw()) for _ in range(3)]
    assert not any((guess == rows).all() for guess in guesses for rows in sampled)
    seed = json.loads((parties.run_folder("site-1") / "run.json").read_text())["params"]["seed"]
    reference = central(table(240).iloc[:150], 3, {**params, "seed": seed})
    assert first_difference(merged(parties), bytes(reference.save_raw("json"))) == "", "still centralized training"
    for site in parties.sites[1:]:
        files = [path.read_bytes() for path in parties.run_folder(site).rglob("*") if path.is_file()]
        assert files and not any(str(seed).encode() in content for content in files)


def test_without_sampled_rows_the_seed_is_the_jobs(parties):
    succeed(run(parties, job(params={**PARAMS, "colsample_bytree": 0.5, "seed": 7}, num_rounds=2)))
    assert json.loads((parties.run_folder("site-1") / "run.json").read_text())["params"]["seed"] == 7


# -- prediction and explanation ---------------------------------------------------------------------------------------


@pytest.fixture
def case(tmp_path) -> Case:
    return make_case(tmp_path)


def test_a_prediction_that_asks_nothing_charges_nothing(case):
    lost = case.parties.run(inference_site.run_inference, case.job(), tamper={"site-1": dies_at(Kind.CONVERSATION)})
    assert all(isinstance(outcome, Exception) for outcome in lost.values())
    assert not predictions_charged(case.parties, "site-2") and not predictions_charged(case.parties, "site-3")
    succeed(case.run("later"))
    assert predictions_charged(case.parties, "site-2")


def test_an_explanation_of_too_many_rows_charges_nothing(case, monkeypatch):
    case.parties.set_policies(consents={"explain": True})
    monkeypatch.setattr(inference_site, "_MAX_PART_BYTES", 10)
    outcomes = case.run(action="explain")
    assert any("too many rows at once" in str(outcome) for outcome in outcomes.values())
    assert not predictions_charged(case.parties, "site-2") and not predictions_charged(case.parties, "site-3")


# -- alignment --------------------------------------------------------------------------------------------------------


def alignments(parties: Parties) -> dict[str, int]:
    return {
        site: len(told(memory_in(parties.workspace(site), site), "SELECT 1 FROM alignments")) for site in parties.sites
    }


@pytest.mark.parametrize(("kind", "nth", "kept"), [(Kind.AGREEMENT, 2, False), (Kind.CONVERSATION, 2, True)])
def test_a_failed_alignment_is_remembered_where_ids_left_blinded_or_not(tmp_path, kind, nth, kept):
    parties = Parties(tmp_path, 3, {"vertical": {"min_intersection": 5}})
    for site in parties.sites:
        parties.give(site, "people", pd.DataFrame({"id": [f"p{i}" for i in range(30)], "x": 1.0}), id="id")
    outcomes = parties.run(align_site, AlignmentJob(["people"]), tamper={"site-3": dies_at(kind, nth)})
    assert all(isinstance(outcome, Exception) for outcome in outcomes.values())
    found = alignments(parties)
    assert (found["site-1"], found["site-2"]) == ((1, 1) if kept else (0, 0))


# -- disks ------------------------------------------------------------------------------------------------------------

WRITERS = {  # what is written, by whom, the write that fails, and what of the call names the site
    "checkpoint": (context.Checkpoint, "write", 3, lambda self, folder: folder.path),
    "registry": (Registry, "trees_complete", 3, lambda self, *of: self._memory.path),
    "ledger_of_sums": (ReleasedSums, "charging", 4, lambda self: self._memory.path),
    "predictions": (PredictionBudget, "charge", 1, lambda self, *of: self._memory.path),
    "part": (model, "write_part", 1, lambda folder, *of: folder),
}


@pytest.mark.parametrize(
    ("writer", "victim"),
    [
        *(("checkpoint", "site-1"), ("ledger_of_sums", "site-2"), ("part", "site-3")),
        *slow(("registry", "site-2"), ("predictions", "site-2")),
        *slow(("checkpoint", "site-3"), ("registry", "site-1"), ("part", "site-1")),
    ],
)
def test_a_full_disk_is_named_at_once_and_the_job_resumes_when_there_is_room(tmp_path, monkeypatch, writer, victim):
    parties = federation(tmp_path, n_rows=150)
    target, name, nth, place = WRITERS[writer]
    honest, calls = getattr(target, name), []

    def full(*of, **more):
        if victim in place(*of).parts:
            calls.append(1)
            if len(calls) >= nth:
                raise OSError(errno.ENOSPC, "No space left on device", "/secret/path")
        return honest(*of, **more)

    monkeypatch.setattr(target, name, full)
    training = {"num_rounds": 4, "eval_data_set": "held"}
    outcomes = run(parties, job(**training), "lost")
    assert calls and "the disk is full" in error_text(outcomes[victim]), outcomes
    assert all("secret" not in error_text(outcome) for outcome in outcomes.values())
    assert all(isinstance(outcome, Exception) for outcome in outcomes.values())
    logs = [(parties.run_folder(site, "lost") / "evidence" / f"{site}.evidence.jsonl") for site in parties.sites]
    assert all('"aborted"' in log.read_text().splitlines()[-2] for log in logs)
    monkeypatch.setattr(target, name, honest)
    if all(list(parties.run_folder(site, "lost").glob("checkpoint-*")) for site in parties.sites):
        succeed(run(parties, job(**training, resume_from="lost"), "resumed"))
    else:
        assert writer in ("ledger_of_sums", "predictions")
        succeed(run(parties, job(**training), "again"))
