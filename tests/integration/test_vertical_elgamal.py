"""Whole vertical jobs under profile ``elgamal``: equal to centralized training, resumed, guarded, refused, lied to."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from he_processors.curve.registry import available_backends
from he_processors.elgamal.encryption import DigitFormat
from he_processors.errors import BackendUnavailable, VeilBoostError
from he_processors.fixed_point import REFUSED
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.evidence.format import Protection
from nvflare_plugins.kinds.vertical import active_party, histogram_maker, key_owner
from nvflare_plugins.kinds.vertical.histogram_maker import HistogramMaker
from nvflare_plugins.kinds.vertical.key_owner import elgamal_owner
from nvflare_plugins.wire.envelope import Kind
from tests.integration.test_vertical_hostile import all_end_clearly
from tests.integration.test_vertical_jobs import dies_in_round, same, sums_by_row
from tests.support.examples import slow
from tests.support.federation import Parties, SiteDied, succeed
from tests.support.vertical_jobs import PARAMS, central, federation, job, merged, run, table

pytestmark = pytest.mark.skipif(available_backends()[0] == "reference", reason="the C extension was not built")

TRAIN, HELD = table(390).iloc[:300], table(390).iloc[300:]
ELGAMAL = {"profile": "elgamal"}


@pytest.fixture
def parties(tmp_path) -> Parties:
    found = federation(tmp_path)
    found.set_policies(allowed_profiles=["elgamal", "plain", "paillier"])
    return found


def record(parties: Parties, site: str, job_id: str = "job") -> dict:
    return json.loads((parties.run_folder(site, job_id) / "run.json").read_text())


def test_the_parts_make_the_centralized_model_and_the_evidence_names_the_scheme(parties):
    succeed(run(parties, job(**ELGAMAL, eval_data_set="held", num_rounds=2)))
    assert same(merged(parties), central(TRAIN, 2))
    logs = {
        site: (parties.run_folder(site) / "evidence" / f"{site}.evidence.jsonl").read_text() for site in parties.sites
    }
    for text in logs.values():
        entries = [entry for line in text.splitlines() if (entry := json.loads(line)).get("type") == "content"]
        assert Protection.ELGAMAL.name in {entry["protection"] for entry in entries}
        assert '"scheme":"elgamal"' in text.replace(" ", "") and '"security_bits":128' in text.replace(" ", "")
    assert "key_bits" not in logs["site-1"]
    assert "128-bit strength" in "\n".join(parties.said["site-1"])
    assert {"histogram", "hide"} <= set(record(parties, "site-2")["rounds"][0]["stages"])
    rounds = record(parties, "site-1")["rounds"]
    assert all({"encrypt", "decrypt", "search"} <= set(one["stages"]) for one in rounds)


def test_the_next_trees_randomisers_are_made_meanwhile(parties, monkeypatch):
    honest, filled = key_owner.ElGamalGradientOwner.fill, []
    monkeypatch.setattr(key_owner.ElGamalGradientOwner, "fill", lambda self, n: (filled.append(n), honest(self, n))[1])
    succeed(run(parties, job(**ELGAMAL, num_rounds=3)))
    assert filled == [300, 300], "for each tree but the first"


def test_a_lost_job_resumes_and_own_rounds_come_first(parties):
    training = {**ELGAMAL, "num_rounds": 4, "own_rounds": 1}
    succeed(run(parties, job(**training), "whole"))
    lost = run(parties, job(**training), "lost", tamper={"site-2": dies_in_round(2)}, notices_death=True)
    assert isinstance(lost["site-2"], SiteDied)
    succeed(run(parties, job(**training, resume_from="lost"), "resumed"))
    assert merged(parties, "resumed") == merged(parties, "whole")


def test_sampling_and_early_stopping(parties):
    params = {**PARAMS, "eta": 1.0, "subsample": 0.8, "colsample_bytree": 0.8}
    changes = {"eval_data_set": "held", "early_stopping_rounds": 1, "num_rounds": 6, "params": params}
    succeed(run(parties, job(**ELGAMAL, **changes)))
    seed = record(parties, "site-1")["params"]["seed"]
    reference = central(TRAIN, 6, {**params, "seed": seed}, held=HELD, early_stopping_rounds=1)
    assert same(merged(parties), reference)


def test_short_points_give_the_centralized_model(parties):
    succeed(run(parties, job(**ELGAMAL, point_bytes=32, num_rounds=2)))
    assert same(merged(parties), central(TRAIN, 2))


def test_twenty_bits_train_and_say_that_the_model_is_another(parties):
    succeed(run(parties, job(**ELGAMAL, fraction_bits=20, point_bytes=32, num_rounds=2)))
    assert not same(merged(parties), central(TRAIN, 2)), "the control: leaves of rounded gradients differ"
    assert "not the model of centralized training" in json.dumps(record(parties, "site-1"))
    assert "not the centralized model" in "\n".join(parties.said["site-1"])


@pytest.mark.parametrize(("changes", "digits"), [({}, 2), *slow(({"fraction_bits": 20}, 1))])
def test_guards_count_what_the_active_party_sees(tmp_path, changes, digits):
    charged = {}
    for name, profile in (("plain", {"profile": "plain"}), ("elgamal", {**ELGAMAL, **changes})):
        parties = federation(tmp_path / name, n_rows=1500)
        parties.set_policies(allowed_profiles=[name])
        succeed(run(parties, job(**profile, preset="guarded", num_rounds=1, params={**PARAMS, "max_depth": 1})))
        charged[name] = sums_by_row(parties, "site-2")
    assert charged["plain"].max() > 0
    np.testing.assert_array_equal(charged["elgamal"], digits * charged["plain"])
    sections = json.dumps(record(parties, "site-2")["sections"])
    assert ("counts as 4 sums" in sections) == (digits == 2)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_policy_that_does_not_name_it_refuses_it(parties):
    parties.set_policy("site-2", allowed_profiles=["paillier", "plain"])
    outcomes = run(parties, job(**ELGAMAL))
    assert isinstance(outcomes["site-2"], PolicyRefusal) and "allowed_profiles" in str(outcomes["site-2"])
    assert not [t for t in parties.transfers if t.frame.kind is Kind.CONVERSATION]


def test_a_site_without_a_compiled_curve_refuses_before_anything_is_sent(parties, monkeypatch):
    monkeypatch.setattr(histogram_maker, "REFERENCE", available_backends()[0])
    outcomes = run(parties, job(**ELGAMAL))
    assert all(isinstance(one, VeilBoostError) for one in outcomes.values())
    assert any(isinstance(one, BackendUnavailable) and "paillier" in str(one) for one in outcomes.values())


def announced(monkeypatch, change) -> None:
    honest = active_party.open_owner

    def lie(*of):
        owner = honest(*of)
        said = dataclasses.replace(owner.setup, **change(owner))
        owner.setup = said
        return owner

    monkeypatch.setattr(active_party, "open_owner", lie)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda owner: {"public_key": elgamal_owner(DigitFormat.of(40, 300)).setup.public_key}, "another key"),
        (lambda owner: {"public_key": elgamal_owner(DigitFormat.of(14, 300)).setup.public_key}, "number of points"),
        (lambda owner: {"public_key": owner.setup.public_key[:-1]}, "no elgamal key"),
        (lambda owner: {"public_key": owner.setup.public_key[:-64] + bytes(64)}, "no point of the curve"),
        (lambda owner: {"public_key": owner.setup.public_key[:-32] + b"\1" + bytes(31)}, "no point of the curve"),
        (lambda owner: {"fraction_bits": 20}, "fraction bits"),
        (lambda owner: {"scheme": 1}, "another scheme"),
        (lambda owner: {"max_additions": 299}, "number of rows"),
    ],
)
def test_announcements_that_are_not_the_jobs_end_it(parties, monkeypatch, change, said):
    announced(monkeypatch, change)
    all_end_clearly(parties, run(parties, job(**ELGAMAL)), said)


@pytest.mark.parametrize("change", ["swapped", "off_curve", "small_order", "short", "other_count"])
def test_sums_that_are_not_sums_end_the_job(parties, monkeypatch, change):
    honest = HistogramMaker.sum_bins

    def lie(self, *of):
        sums = bytearray(honest(self, *of))
        if change == "swapped":
            sums[-64:], sums[-128:-64] = sums[-128:-64], sums[-64:]
            if sums[-64:] == sums[-128:-64]:
                raise AssertionError("two equal points")
        elif change == "off_curve":
            sums[-64] ^= 1
        elif change == "small_order":  # x = 0, y = -1
            sums[-64:] = bytes(32) + (2**255 - 20).to_bytes(32, "little")
        elif change == "short":
            del sums[-1]
        else:
            sums[20] ^= 1
        return bytes(sums)

    monkeypatch.setattr(HistogramMaker, "sum_bins", lie)
    outcomes = run(parties, job(**ELGAMAL))
    said = {"off_curve": "no point of the curve", "short": "bytes, expected", "other_count": "for another key"}
    all_end_clearly(parties, outcomes, said.get(change, REFUSED))


def test_gradients_that_are_no_points_end_the_job(parties, monkeypatch):
    honest = key_owner.ElGamalGradientOwner.encrypt

    def lie(self, g, h):
        data = bytearray(honest(self, g, h))
        data[-1] |= 0x80
        return bytes(data)

    monkeypatch.setattr(key_owner.ElGamalGradientOwner, "encrypt", lie)
    all_end_clearly(parties, run(parties, job(**ELGAMAL)), "no point of the curve")
