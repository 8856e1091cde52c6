"""Profiles over sites in threads: equal to the pooled table, of no small count, refused where they should be."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.evidence.reader import read_log
from nvflare_plugins.evidence.verification import verify
from nvflare_plugins.kinds.horizontal.site import run_site as run_horizontal_site
from nvflare_plugins.kinds.profile import site as profile_site
from nvflare_plugins.kinds.profile.job import ProfileJob, profile_messages
from nvflare_plugins.kinds.profile.site import run_profile_site
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.pooled import spans
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.plan import message_bytes
from nvflare_plugins.wire.envelope import Codec, Kind
from tests.support.examples import slow
from tests.support.federation import Parties, succeed

POLICY = {"consents": {"feature_profile": True}}
WARDS = ["Chirurgie", "Innere", "Übrige", "nie", "selten"]


def rows(seed: int, n_rows: int) -> pd.DataFrame:
    """Return rows of one site: gaps, a name beyond ASCII, values of all sizes, categories of which some are rare."""
    random = np.random.default_rng(seed)
    frame = pd.DataFrame({"größe": random.normal(seed, 2.0, n_rows), "winzig": random.normal(size=n_rows) * 1e-9})
    frame["riesig"] = random.integers(0, 7, n_rows) * 1e9
    frame["nichts"] = random.normal(size=n_rows)
    frame["station"] = random.choice([*WARDS[:3], WARDS[4]], n_rows, p=[0.4, 0.3, 0.29, 0.01])
    signal = frame["größe"] / 2 + 1e9 * frame["winzig"] + (frame["station"] == "Innere") - seed / 2
    frame["y"] = (signal + random.normal(size=n_rows) > 0.4).astype(np.int64)
    frame.loc[random.random(n_rows) < 0.2, "größe"] = np.nan
    frame.loc[random.random(n_rows) < 0.004, "winzig"] = np.nan
    frame.loc[random.random(n_rows) < 0.1, "station"] = None
    return frame


FRAMES = tuple(rows(number, 300 + 100 * number) for number in range(3))


def sites(folder: Path, frames: tuple[pd.DataFrame, ...] = FRAMES, **policy: Any) -> Parties:
    return Parties.with_tables(folder, frames, {**POLICY, **policy})


def job(**changes: Any) -> ProfileJob:
    document = {"data_set": "train", "label": "y", "categories": {"station": WARDS}, "max_bin": 32, **changes}
    return ProfileJob.from_dict(document)


def profile_of(parties: Parties, job_id: str = "job") -> dict[str, Any]:
    """Return ``profile.json``, which must be the same at every site."""
    first, *rest = [json.loads((parties.run_folder(s, job_id) / "profile.json").read_text()) for s in parties.sites]
    assert all(one == first for one in rest)
    return first


def inside(values: pd.Series, one: dict[str, Any]) -> np.ndarray:
    """Return which rows of a column lie in a bin of profile.json."""
    found = np.zeros(len(values), dtype=bool)
    if "categories" in one:
        found |= values.isin(one["categories"]).to_numpy()
    elif one["values"]:
        numbers = values.to_numpy(np.float32)
        low = -np.inf if one["low"] is None else np.float32(one["low"])
        high = np.inf if one["high"] is None else np.float32(one["high"])
        found |= (numbers >= low) & (numbers < high)
    return found | (values.isna().to_numpy() & one["missing"])


def check_against_the_pooled_table(found: dict[str, Any], pooled: pd.DataFrame, classes: list[Any], least: int) -> None:
    assert found["rows"] == len(pooled)
    assert [one["rows"] for one in found["classes"]] == [int((pooled.y == label).sum()) for label in classes]
    assert {one["name"] for one in found["features"]} == set(pooled) - {"y"}
    for one in found["features"]:
        column = pooled[one["name"]]
        assert one["missing"] == column.isna().sum() and one["missing_rate"] == column.isna().mean()
        places = [inside(column, each) for each in one["bins"]]
        assert (np.sum(places, axis=0) == 1).all(), "every row is in one bin"
        table = np.array([[int((pooled.y[place] == label).sum()) for label in classes] for place in places])
        assert table.tolist() == [each["counts"] for each in one["bins"]] and table.min() >= least
        for of_class in range(len(classes)):
            value = 0.0
            of, others = table[:, of_class].sum(), table.sum() - table[:, of_class].sum()
            for each, row in zip(one["bins"], table, strict=True):
                share, rest = row[of_class] / of, (row.sum() - row[of_class]) / others
                assert each["weights_of_evidence"][of_class] == pytest.approx(math.log(share / rest), abs=1e-12)
                value += (share - rest) * math.log(share / rest)
            assert one["information_values"][of_class] == pytest.approx(value, rel=1e-9, abs=1e-12)
    values = [one["at_least"] for one in found["features"]]
    assert all(one["at_least"] >= one["information_value"] for one in found["features"])
    assert values == sorted(values, reverse=True) and found["ranking"] == [one["name"] for one in found["features"]]


@pytest.mark.parametrize("profile", ["masks", "plain", *slow("bfv", "ckks")])
def test_a_profile_is_that_of_the_pooled_table(profile: str, tmp_path: Path) -> None:
    consents = {"feature_profile": True, "plain_profile": True}
    parties = sites(tmp_path, allowed_profiles=[profile], consents=consents)
    succeed(parties.run(run_profile_site, job(profile=profile)))
    found = profile_of(parties)
    pooled = pd.concat(FRAMES, ignore_index=True)
    check_against_the_pooled_table(found, pooled, [0, 1], 10)
    bins = {one["name"]: one["bins"] for one in found["features"]}
    assert found["ranking"][0] == "winzig" and len(bins["winzig"]) > 8 and len(bins["riesig"]) == 7
    assert found["features"][-1]["information_value"] < 3 * found["features"][-1]["by_chance"]
    # Missing values are a bin where they are enough of each class, else they are in the lowest.
    assert [one for one in bins["größe"] if one["missing"]] == [bins["größe"][-1]] and not bins["größe"][-1]["values"]
    assert bins["winzig"][0]["missing"] and bins["winzig"][0]["values"]
    assert bins["station"][2]["categories"] == ["Übrige", "nie", "selten"]
    sent = {(t.frame.kind, t.frame.codec) for t in parties.transfers}
    codec = {"masks": Codec.MASKED, "plain": Codec.PLAIN, "bfv": Codec.BFV, "ckks": Codec.CKKS}[profile]
    assert {(Kind.CLASS_COUNTS, codec), (Kind.CELL_FLAGS, Codec.MASKED)} <= sent


def test_pages_and_record(tmp_path: Path) -> None:
    parties = sites(tmp_path)
    succeed(parties.run(run_profile_site, job()))
    logs = [parties.run_folder(site) / "evidence" for site in parties.sites]
    assert verify(logs).attempts[0].failures == ("the log of server is missing",)
    shared = {(parties.run_folder(site) / "profile.html").read_text() for site in parties.sites}
    assert len(shared) == 1
    (page,) = shared
    assert "größe" in page and "<svg" in page and "://" not in page and "Weight of evidence" in page
    local = {(parties.run_folder(site) / "local.html").read_text() for site in parties.sites}
    assert len(local) == 3 and all("Stability index" in one and "<svg" in one for one in local)
    for site, frame in zip(parties.sites, FRAMES, strict=True):
        record = RunRecord.read(parties.run_folder(site))
        assert record.consents == ("feature_profile",) and record.data[0].rows == len(frame)
        assert "Information value" in (parties.run_folder(site) / "report.html").read_text()
        assert oct((parties.run_folder(site) / "local.html").stat().st_mode)[-3:] == "600"
        log = read_log(next((parties.run_folder(site) / "evidence").glob("*.jsonl")))
        assert {"CLASS_COUNTS", "CELL_FLAGS"} <= {message.kind for message in log.messages}


def test_bins_that_rise_or_fall_throughout_hold_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = sites(tmp_path / "plain")
    succeed(plain.run(run_profile_site, job()))
    parties = sites(tmp_path)
    succeed(parties.run(run_profile_site, job(monotonic=True)))
    before = {one["name"]: one["bins"] for one in profile_of(plain)["features"]}
    n_joined = 0
    for one in profile_of(parties)["features"]:
        bins, was = one["bins"], before[one["name"]]
        assert np.sum([b["counts"] for b in bins], 0).tolist() == np.sum([b["counts"] for b in was], 0).tolist()
        if one["name"] == "station":
            assert bins == was, "categories have no order"
            continue
        n_joined += len(was) - len(bins)
        rates = [b["counts"][1] / b["rows"] for b in bins if b["values"]]
        assert sorted(rates) in (rates, rates[::-1])
    assert n_joined > 0


def test_the_stability_index_sees_the_site_that_differs(tmp_path: Path) -> None:
    parties = sites(tmp_path)
    succeed(parties.run(run_profile_site, job()))
    for site in parties.sites:
        page = (parties.run_folder(site) / "local.html").read_text()
        assert page.index("größe") < page.index("winzig"), "the sites' means of größe are 0, 1 and 2"


def test_a_column_that_separates_the_classes_leads_the_ranking_though_no_bin_can_be_shown(tmp_path: Path) -> None:
    frames = tuple(frame.assign(nichts=np.where(frame.y == 1, 1.0, -1.0) + frame.nichts * 0.01) for frame in FRAMES)
    parties = sites(tmp_path, frames)
    succeed(parties.run(run_profile_site, job()))
    first = profile_of(parties)["features"][0]
    assert first["name"] == "nichts" and first["information_value"] == 0 and len(first["bins"]) == 1
    assert first["at_least"] > 2 and "at least" in (parties.run_folder("site-1") / "profile.html").read_text()


@pytest.mark.slow
def test_many_columns_are_counted_as_few_are(tmp_path: Path) -> None:
    """More flags in a message than keystream is made at once."""
    noise = [np.random.default_rng(n).normal(size=(len(f), 40)) for n, f in enumerate(FRAMES)]
    columns = [f"rauschen-{number}" for number in range(40)]
    frames = tuple(
        pd.concat([f, pd.DataFrame(own, columns=columns)], axis=1) for f, own in zip(FRAMES, noise, strict=True)
    )
    parties = sites(tmp_path, frames)
    succeed(parties.run(run_profile_site, job(max_bin=256)))
    check_against_the_pooled_table(profile_of(parties), pd.concat(frames, ignore_index=True), [0, 1], 10)


def test_classes_are_compared_with_all_others(tmp_path: Path) -> None:
    frames = tuple(frame.assign(y=np.where(frame.riesig > 4e9, "hoch", frame.y.map(str))) for frame in FRAMES)
    parties = sites(tmp_path, frames)
    succeed(parties.run(run_profile_site, job(label_classes=["0", "1", "hoch"])))
    found = profile_of(parties)
    check_against_the_pooled_table(found, pd.concat(frames, ignore_index=True), ["0", "1", "hoch"], 10)
    assert "hoch" in (parties.run_folder("site-1") / "profile.html").read_text()


@pytest.mark.parametrize("lacking", ["rows", "a class"])
def test_sites_without_rows_or_a_class_take_part(
    lacking: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    last = FRAMES[2].iloc[:0] if lacking == "rows" else FRAMES[2][FRAMES[2].y == 0]
    frames = (*FRAMES[:2], last, FRAMES[0].iloc[::-1].assign(nichts=1.0))
    parties = sites(tmp_path, frames)
    succeed(parties.run(run_profile_site, job()))
    check_against_the_pooled_table(profile_of(parties), pd.concat(frames, ignore_index=True), [0, 1], 10)
    assert ("takes part without rows" if lacking == "rows" else "of one class") in caplog.text
    assert (parties.run_folder("site-3") / "local.html").exists() == (lacking != "rows")


def test_a_training_uses_the_cut_points_of_a_profile_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    parties = sites(tmp_path)
    succeed(parties.run(run_profile_site, job()))
    searched = sum(t.frame.kind is Kind.CUT_COUNTS for t in parties.transfers)
    parties.transfers.clear()
    params = {"objective": "binary:logistic", "max_depth": 2, "max_bin": 32, "nthread": 1}
    training = HorizontalJob("train", "y", params, 2, categories={"station": WARDS}, tracking=False)
    succeed(parties.run(run_horizontal_site, training, "after"))
    asked = sum(t.frame.kind is Kind.CUT_COUNTS for t in parties.transfers)
    assert searched == 34 * asked and "cut points of an earlier job of these sites are used again" in caplog.text
    cuts = [(parties.run_folder("site-2", name) / "cuts.json").read_text() for name in ("job", "after")]
    assert cuts[0] == cuts[1]
    # Other settings are another search, and another least number of rows is one.
    for change in ({"max_bin": 16}, {"min_rows_per_cut": 11}):
        outcomes = parties.run(run_profile_site, job(**change), f"other-{len(change)}-{next(iter(change))}")
        assert any("second_quantile_search" in str(outcome) for outcome in outcomes.values()), outcomes


@pytest.mark.parametrize("n_added", [400, 40])
def test_added_rows_are_profiled_where_they_are_enough(n_added: int, tmp_path: Path) -> None:
    parties = sites(tmp_path)
    succeed(parties.run(run_profile_site, job()))
    frames = tuple(pd.concat([f, rows(10 + n, n_added)], ignore_index=True) for n, f in enumerate(FRAMES))
    for site, frame in zip(parties.sites, frames, strict=True):
        parties.give(site, "train", frame)
    outcomes = parties.run(run_profile_site, job(), "next")
    if n_added == 40:
        assert any("recompute_with_changes" in str(outcome) for outcome in outcomes.values()), outcomes
        return
    succeed(outcomes)
    check_against_the_pooled_table(profile_of(parties, "next"), pd.concat(frames, ignore_index=True), [0, 1], 10)


def test_too_few_rows_of_a_class_count_nothing(tmp_path: Path) -> None:
    frames = tuple(frame.assign(y=(np.arange(len(frame)) < 2).astype(int)) for frame in FRAMES)
    parties = sites(tmp_path, frames)
    succeed(parties.run(run_profile_site, job()))
    assert profile_of(parties)["features"] == [] and profile_of(parties)["classes"] == []
    assert not any(t.frame.kind is Kind.CLASS_COUNTS for t in parties.transfers)
    assert "Nothing was counted" in (parties.run_folder("site-1") / "report.html").read_text()
    assert "Nothing was counted" in (parties.run_folder("site-1") / "profile.html").read_text()


def reasons(parties: Parties, asked: ProfileJob) -> str:
    outcomes = parties.run(run_profile_site, asked, f"job-{len(parties.transfers)}")
    assert all(isinstance(outcome, Exception) for outcome in outcomes.values()), outcomes
    assert not any(t.frame.kind is Kind.CLASS_COUNTS for t in parties.transfers)
    assert not list(parties.folder.rglob("profile.*")) and not list(parties.folder.rglob("local.html"))
    return " | ".join(str(outcome) for outcome in outcomes.values())


def test_refusals(tmp_path: Path) -> None:
    parties = sites(tmp_path)
    parties.set_policy("site-2", consents={})
    assert "consents.feature_profile" in reasons(parties, job())
    parties.set_policy("site-2", **POLICY, min_rows_per_cut=20)
    assert "min_rows_per_cut" in reasons(parties, job())
    parties.set_policy("site-2", min_rows_per_cut=10)
    budget = {"epsilon": 1.0, "delta": 1e-6}
    consents = {"feature_profile": True, "exact_use_of_budgeted_data": True}
    parties.set_policy("site-2", consents=consents)
    parties.give("site-2", "train", FRAMES[1], privacy=budget)
    assert "counts of a profile are not charged to it" in reasons(parties, job())


def test_labels_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    parties = sites(tmp_path, tuple(frame.assign(y=frame.riesig + 0.5) for frame in FRAMES))
    assert "label for regression has no weight of evidence" in reasons(parties, job())


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"profile": "dp_distributed"}, "profile='dp_distributed' is unknown; choose one of plain, masks, bfv, ckks"),
        ({"label_classes": ["only"]}, "label_classes of a profile must have 2 to 64"),
        ({"label_classes": list(range(65))}, "label_classes of a profile must have 2 to 64"),
        ({"max_bin": 2}, "max_bin"),
        ({"min_rows_per_cut": 1}, "min_rows_per_cut"),
    ],
)
def test_a_job_that_no_site_would_accept(field: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        job(**field)


def test_a_site_that_claims_rows_which_nobody_has_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = profile_site.local_bits

    def lie(own: np.ndarray, least: int, n_sites: int) -> np.ndarray:
        bits = real(own, least, n_sites)
        bits[0] = True
        return bits

    monkeypatch.setattr(profile_site, "local_bits", lie)
    outcomes = sites(tmp_path).run(run_profile_site, job())
    assert all("contradict" in str(outcome) for outcome in outcomes.values()), outcomes
    assert not list(tmp_path.rglob("profile.*"))


def test_no_message_of_the_bits_is_larger_than_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = sites(tmp_path / "whole"), sites(tmp_path / "cut")
    succeed(whole.run(run_profile_site, job()))
    monkeypatch.setattr(spans, "_MOST_FLAGS", 600)
    succeed(cut.run(run_profile_site, job()))
    asked = [t for t in cut.transfers if t.frame.kind is Kind.CELL_FLAGS]
    assert len(asked) > len([t for t in whole.transfers if t.frame.kind is Kind.CELL_FLAGS])
    assert max(len(t.frame.payload) for t in asked) < 8 * 620
    assert profile_of(cut)["features"] == profile_of(whole)["features"]


@pytest.mark.parametrize("profile", ["masks", "bfv"])
def test_a_profile_sends_what_its_plan_says(profile: str, tmp_path: Path) -> None:
    frames = tuple(frame[["nichts", "winzig", "station", "y"]] for frame in FRAMES)
    parties, asked = sites(tmp_path, frames, allowed_profiles=[profile]), job(profile=profile, max_bin=8)
    succeed(parties.run(run_profile_site, asked))
    log = read_log(next((parties.run_folder("site-2") / "evidence").glob("*.jsonl")))
    for planned in profile_messages(asked, 3):
        sent = [m.size for m in log.messages if m.kind == planned.kind.name and m.direction == "sent"]
        size = message_bytes(planned, profile)
        if planned.kind is Kind.CLASS_COUNTS:
            assert 0 < max(sent) <= size
        else:
            assert sent.count(size) >= planned.messages, planned
