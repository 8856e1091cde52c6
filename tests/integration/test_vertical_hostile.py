"""Vertical jobs in which a party lies, dies or dawdles; and what the parties' files and messages hold."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import Counter

import numpy as np
import pytest

from he_processors.ciphertext_wire import public_key_to_bytes
from he_processors.errors import ProtocolError, VeilBoostError
from he_processors.fixed_point import REFUSED
from nvflare_plugins.kinds.vertical import active_party, histogram_maker, key_owner, messages, passive_party
from nvflare_plugins.kinds.vertical import passive_party as passive
from nvflare_plugins.kinds.vertical.conversation import FlowControl
from nvflare_plugins.kinds.vertical.messages import HistogramAnswer, HistogramRequest, SplitAnswer, from_bytes
from nvflare_plugins.kinds.vertical.model import ACTIVE_FILE, PASSIVE_FILE, ActivePart, PassivePart, read_part
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.envelope import Kind
from tests.integration.test_vertical_jobs import nothing_written
from tests.support.examples import slow
from tests.support.federation import Parties, SiteDied, dies_at, succeed
from tests.support.he_toys import toy_paillier
from tests.support.searching import found_every_time
from tests.support.vertical_federation import first_difference, trees
from tests.support.vertical_jobs import central, federation, job, merged, run, table

PAILLIER = {"profile": "paillier", "key_bits": 2048}


@pytest.fixture
def parties(tmp_path) -> Parties:
    found = federation(tmp_path)
    found.set_policies(min_key_bits=2048)
    return found


def make_toys(monkeypatch) -> None:
    toys = dataclasses.replace(key_owner.PAILLIER, generate=lambda bits: toy_paillier())
    ours = dataclasses.replace(key_owner.BUILT_IN["paillier"], numbers=toys)
    monkeypatch.setitem(key_owner.BUILT_IN, "paillier", ours)


@pytest.fixture
def toy_keys(monkeypatch):
    """Short keys: fast, and refused outside tests."""
    make_toys(monkeypatch)
    honest = histogram_maker.histogram_maker
    claimed = type("LongKey", (), {"key_bits": 2048})
    monkeypatch.setattr(passive_party, "unpack_public_key", lambda *of, **named: claimed)
    monkeypatch.setattr(passive_party, "histogram_maker", lambda *of, **more: honest(*of, **more, allow_toy_keys=True))


def all_end_clearly(parties: Parties, outcomes: dict, said: str) -> None:
    assert all(isinstance(outcome, VeilBoostError) for outcome in outcomes.values()), outcomes
    assert all(said in str(outcome) for outcome in outcomes.values()), outcomes
    assert nothing_written(parties)


# -- lies -------------------------------------------------------------------------------------------------------------


def test_bins_that_do_not_sum_to_their_node_are_refused(parties, monkeypatch):
    honest = histogram_maker.HistogramMaker.sum_bins

    def lie(self, *of):
        sums = np.frombuffer(honest(self, *of), "<i8").copy()
        sums[0] += 1
        return sums.tobytes()

    monkeypatch.setattr(histogram_maker.HistogramMaker, "sum_bins", lie)
    all_end_clearly(parties, run(parties, job()), REFUSED)


@pytest.mark.parametrize("change", ["too_large", *slow("zero"), "swapped", "short"])
def test_ciphertexts_out_of_range_are_refused(parties, toy_keys, monkeypatch, change):
    honest = histogram_maker.HistogramMaker.sum_bins
    width = (toy_paillier().public_key.modulus.bit_length() + 7) // 8

    def lie(self, *of):
        sums = bytearray(honest(self, *of))
        if change == "too_large":
            sums[-width:] = b"\xff" * width
        elif change == "zero":
            sums[-width:] = bytes(width)
        elif change == "swapped":
            sums[-width:], sums[-2 * width : -width] = sums[-2 * width : -width], sums[-width:]
        else:
            del sums[-1]
        return bytes(sums)

    monkeypatch.setattr(histogram_maker.HistogramMaker, "sum_bins", lie)
    outcomes = run(parties, job(**PAILLIER))
    assert isinstance(outcomes["site-1"], ProtocolError)
    all_end_clearly(parties, outcomes, str(outcomes["site-1"]))


def test_gradients_under_another_key_are_refused(parties, toy_keys, monkeypatch):
    honest = active_party.open_owner

    def other_key(*of):
        owner = honest(*of)
        other = public_key_to_bytes(toy_paillier(seed=2).public_key)
        said = dataclasses.replace(owner.setup, public_key=other)
        owner.setup = said
        return owner

    monkeypatch.setattr(active_party, "open_owner", other_key)
    all_end_clearly(parties, run(parties, job(**PAILLIER)), "another key")


def test_an_unprotected_announcement_is_refused_in_an_encrypted_job(parties, monkeypatch):
    honest = active_party.open_owner
    monkeypatch.setattr(active_party, "open_owner", lambda of, *more: honest(job(), *more))
    all_end_clearly(parties, run(parties, job(**PAILLIER)), "another scheme than the job's")


def test_short_keys_are_refused(parties, monkeypatch):
    make_toys(monkeypatch)
    all_end_clearly(parties, run(parties, job(**PAILLIER)), "bits")


@pytest.mark.parametrize(
    "answer",
    [
        SplitAnswer(0, ()),
        HistogramAnswer(0, (7,), b""),
        HistogramAnswer(9, (0,), b""),
        None,
    ],
    ids=["other_type", "other_node", "other_tree", "nothing"],
)
def test_wrong_answers_are_refused(parties, monkeypatch, answer):
    monkeypatch.setattr(passive.PassiveParty, "_histograms", lambda self, request: answer)
    outcomes = run(parties, job())
    assert isinstance(outcomes["site-1"], ProtocolError)
    all_end_clearly(parties, outcomes, str(outcomes["site-1"]))


# -- silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["site-1", "site-3"])
def test_a_party_that_dies_in_a_tree_is_named_and_nothing_is_written(parties, victim):
    outcomes = run(parties, job(checkpoint_every=0), tamper={victim: dies_at(Kind.CONVERSATION, 10)})
    assert isinstance(outcomes[victim], SiteDied)
    del outcomes[victim]
    all_end_clearly(parties, outcomes, f"no message from {victim} within")


def test_a_slow_party_ends_the_job_when_the_job_says_so(parties, monkeypatch):
    honest = passive.PassiveParty._splits

    def slow(self, request):
        time.sleep(2)
        return honest(self, request)

    monkeypatch.setattr(passive.PassiveParty, "_splits", slow)
    outcomes = run(parties, job(deadline_s=1.0))
    all_end_clearly(parties, outcomes, "did not answer within 1 s")


def test_a_slow_party_is_waited_for_within_the_deadline_of_an_answer(parties, monkeypatch):
    """The deadline of an exchange does not bound how long a party computes: it gives signs of life."""
    honest, frames, enough = passive.PassiveParty._splits, Counter(), threading.Event()
    monkeypatch.setattr(FlowControl, "within", lambda deadline_s: FlowControl(patience_s=0.05))

    def slow(self, request):
        if request.tree == 0 and request.splits[0].node == 0:
            frames.clear()
            assert enough.wait(60), "no signs of life"
        return honest(self, request)

    def counted(site):
        def tamper(frame: bytes) -> bytes:
            frames[site] += 1
            if len(frames) == 3 and min(frames.values()) > 5:
                enough.set()
            return frame

        return tamper

    monkeypatch.setattr(passive.PassiveParty, "_splits", slow)
    tamper = {site: counted(site) for site in parties.sites}
    succeed(run(parties, job(num_rounds=2), tamper=tamper))
    assert enough.is_set()


# -- what is where ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_report")
def test_nothing_secret_is_in_another_partys_files_or_messages(parties, toy_keys, monkeypatch):
    """Labels, gradients, leaves and thresholds are searched in everything written and everything sent."""
    secrets: list[bytes] = []
    honest = key_owner.EncryptedGradientOwner.encrypt

    def listen(self, g, h):
        secrets.extend(pair.astype("<i8").tobytes() for pair in np.stack([g, h], axis=1)[:50])
        return honest(self, g, h)

    monkeypatch.setattr(key_owner.EncryptedGradientOwner, "encrypt", listen)
    succeed(run(parties, job(**PAILLIER, num_rounds=3)))
    assert first_difference(merged(parties), central(table(390).iloc[:300], 3).save_raw("json")) == ""
    active = read_part(parties.run_folder("site-1") / ACTIVE_FILE, "site-1", ActivePart).part
    tables = {
        site: read_part(parties.run_folder(site) / PASSIVE_FILE, site, PassivePart).part.table
        for site in ("site-2", "site-3")
    }
    leaves = [
        value
        for tree in trees(active.booster)
        for value, child in zip(tree["split_conditions"], tree["left_children"], strict=True)
        if child < 0
    ]
    own = [
        value
        for tree in trees(active.booster)
        for value, child, feature in zip(
            tree["split_conditions"], tree["left_children"], tree["split_indices"], strict=True
        )
        if child >= 0 and feature < 2
    ]
    thresholds = {site: [split.threshold for split in found.values()] for site, found in tables.items()}
    assert leaves and own and all(thresholds.values()) and len(secrets) > 100
    label = table(390).y.to_numpy(np.float32)[:300]
    forms = {
        "site-1": [form for site in tables for x in thresholds[site] for form in number_forms(x)],
        **{
            site: [
                *secrets,
                label.tobytes(),
                label.astype(np.uint8).tobytes(),
                np.packbits(label > 0).tobytes(),
                *(form for x in [*leaves, *own] for form in number_forms(x)),
                *(form for other in tables if other != site for x in thresholds[other] for form in number_forms(x)),
            ]
            for site in tables
        },
    }
    for site, hidden in forms.items():
        folder = parties.run_folder(site)
        files = b"\n".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
        said = "\n".join(parties.said[site]).encode()
        assert not [form for form in hidden if form in files + said], site
    everything = {form for hidden in forms.values() for form in hidden} | set(partition_bits(merged(parties)))

    def search(number: int) -> set[bytes]:
        if number > 0:
            parties.transfers.clear()
            succeed(run(parties, job(**PAILLIER, num_rounds=3), f"job-{number}"))
        wire = b"".join(t.frame.payload for t in parties.transfers)
        assert len(wire) > 100_000
        return {form for form in everything if form in wire}

    assert not found_every_time(search)
    assert json.loads((parties.run_folder("site-2") / "run.json").read_text())["rounds"][0]["metrics"] == {}


def partition_bits(model: bytes) -> list[bytes]:
    """Return which training rows go left at each root, as bits in either order."""
    values = table(390).drop(columns="y").to_numpy(np.float32)[:300]
    found = []
    for tree in trees(model):
        column, threshold = values[:, tree["split_indices"][0]], np.float32(tree["split_conditions"][0])
        goes_left = np.where(np.isnan(column), bool(tree["default_left"][0]), column < threshold)
        found += [
            np.packbits(bits, bitorder=order).tobytes()
            for bits in (goes_left, ~goes_left)
            for order in ("little", "big")
        ]
    return found


def number_forms(value: float) -> list[bytes]:
    """Return how a number may stand in a file or message; short decimals would be found by chance."""
    exact = np.float32(value)
    texts = {repr(float(exact)), str(exact), json.dumps(float(value))}
    return [exact.tobytes(), np.float64(exact).tobytes(), *(text.encode() for text in texts if len(text) > 5)]


def test_trees_deeper_than_the_job_says_are_refused(parties, monkeypatch):
    honest = active_party.check_vertical_parameters
    monkeypatch.setattr(
        active_party,
        "check_vertical_parameters",
        lambda params, *of, **more: honest({**params, "max_depth": 6}, *of, **more),
    )
    all_end_clearly(parties, run(parties, job()), "below the depth")


def test_answers_longer_than_any_can_be_are_refused(parties, monkeypatch):
    honest = messages.answer_bytes

    def answer(question: bytes, *of) -> bytes:
        is_histogram = isinstance(from_bytes(question), HistogramRequest)
        return honest(question, *of) + bytes(is_histogram * (4 << 20))

    monkeypatch.setattr(messages, "answer_bytes", answer)
    all_end_clearly(parties, run(parties, job()), "too long")


def test_questions_longer_than_any_can_be_are_refused(parties, monkeypatch):
    honest = messages.to_bytes

    def long(message) -> bytes:
        return honest(message) + bytes(isinstance(message, HistogramRequest) * (4 << 20))

    monkeypatch.setattr(messages, "to_bytes", long)
    all_end_clearly(parties, run(parties, job()), "too long")


# -- what an evaluation set would give away ---------------------------------------------------------------------------


def test_evaluation_rows_are_charged_as_a_prediction(parties):
    parties.set_policy("site-2", vertical={"predictions_per_row": 2})
    for number in range(2):
        succeed(run(parties, job(eval_data_set="held", num_rounds=1), f"job-{number}"))
    succeed(run(parties, job(eval_data_set="data", num_rounds=1), "own"))
    outcomes = run(parties, job(eval_data_set="held", num_rounds=1), "once-more")
    assert "predictions_per_row" in str(outcomes["site-2"])
    assert isinstance(outcomes["site-1"], VeilBoostError)


def test_one_partys_refusal_spends_nothing_at_the_others(parties):
    for site, budget in (("site-2", 2), ("site-3", 1)):
        parties.set_policy(site, vertical={"predictions_per_row": budget})
    for number, ends_well in enumerate((True, False, False)):
        outcomes = run(parties, job(eval_data_set="held", num_rounds=1), f"job-{number}")
        assert isinstance(outcomes["site-2"], VeilBoostError) != ends_well
    parties.set_policy("site-3", vertical={"predictions_per_row": 2})
    succeed(run(parties, job(eval_data_set="held", num_rounds=1), "last"))


def test_rows_whose_randomised_buckets_were_sent_are_not_trained_on(parties):
    SentRows(SitePolicy.load(parties.workspace("site-3"), "site-3")).note("earlier", ["somebody"])
    assert "randomised buckets" in str(run(parties, job())["site-3"])  # these rows have no ids: they may be the same


def test_rows_divided_otherwise_than_the_sums_say_are_noticed(parties, monkeypatch):
    """The model would be wrong without anyone seeing it."""
    honest = passive.PassiveParty._splits

    def lie(self, request):
        answer = honest(self, request)
        bits = answer.goes_left[0].unpack()
        changed = np.concatenate([~bits[:1], bits[1:]])
        return SplitAnswer(answer.tree, (messages.Bits.of(changed), *answer.goes_left[1:]))

    monkeypatch.setattr(passive.PassiveParty, "_splits", lie)
    all_end_clearly(parties, run(parties, job()), "divided rows otherwise")
