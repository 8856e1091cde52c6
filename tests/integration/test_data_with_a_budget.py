"""Data sets with a budget take no exact job of any kind, nor do rows whose buckets were sent."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import Silent, SiteContext
from nvflare_plugins.base.errors import ROWS_TEXT, DataRefusal, PolicyRefusal
from nvflare_plugins.kinds.alignment.align import align_site
from nvflare_plugins.kinds.alignment.job import AlignmentJob
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob
from nvflare_plugins.kinds.federboost_vertical.training import run_site as run_buckets
from nvflare_plugins.kinds.horizontal.site import run_site
from nvflare_plugins.kinds.vertical.job import VerticalJob
from nvflare_plugins.kinds.vertical.model import ModelIdentity, PassivePart
from nvflare_plugins.kinds.vertical.site import run_vertical_site
from nvflare_plugins.kinds.vertical_inference import site as inference_site
from nvflare_plugins.kinds.vertical_inference.job import InferenceJob
from nvflare_plugins.pooled import preparation
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.memory.store import Memory
from tests.support.exact_jobs import BUDGET, SITES, job, place_of, table, with_value
from tests.support.memories import changed, told

PARAMS = {"objective": "binary:logistic", "max_depth": 2, "max_bin": 32}
VERTICAL = {"active": "site-1", "label": "y", "params": PARAMS, "num_rounds": 1}


def vertical(**changes: object) -> VerticalJob:
    fields = {"data_set": "d", "profile": "paillier", "preset": "guarded", **VERTICAL, **changes}
    return VerticalJob.from_dict(fields)


def take_part(kind: str, context: SiteContext) -> None:
    """Run a job of a kind up to its first exchange; data set d is the one in question, e is another one."""
    match kind:
        case "horizontal" | "evaluation":
            sets = {"data_set": "d"} if kind == "horizontal" else {"data_set": "e", "eval_data_set": "d"}
            run_site(job(**sets), context, None, 1.0)
        case "vertical" | "vertical evaluation":
            sets = {"data_set": "d"} if kind == "vertical" else {"data_set": "e", "eval_data_set": "d"}
            run_vertical_site(vertical(**sets), context, None, 1.0, Silent())
        case "alignment":
            align_site(AlignmentJob(["d"]), context, None, 1.0, Silent())
        case "inference":
            inference_site.run_inference(InferenceJob(model="m", data_set="d"), context, None, 1.0, Silent())
        case "buckets":
            run_buckets(BucketJob("d", "site-1", "y", params=VERTICAL["params"]), context, None, 1.0)


@pytest.fixture
def stored_part(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = ModelIdentity("m", "site-2", SITES, (bytes(32),) * 3)
    part = SimpleNamespace(part=PassivePart({}, ("a", "b"), ("f0", "f1")), identity=identity)
    monkeypatch.setattr(inference_site, "find_part", lambda *_: part)


@pytest.mark.parametrize(
    ("kind", "site"),
    [
        ("horizontal", "site-1"),
        ("evaluation", "site-1"),
        ("vertical", "site-1"),
        ("vertical", "site-2"),
        ("vertical evaluation", "site-2"),
        ("inference", "site-1"),
        ("buckets", "site-1"),
    ],
)
def test_data_with_a_budget_take_private_jobs_only(tmp_path: Path, kind: str, site: str, stored_part: None) -> None:
    """Also as an evaluation set, at every party, and before anything is loaded: there is no file at all."""
    sets = {"d": {"path": "d.csv", "id": "id", "privacy": BUDGET}, "e": {"path": "e.csv", "id": "id"}}
    with pytest.raises(PolicyRefusal, match=r"'d' a privacy budget.*consents\.exact_use_of_budgeted_data.*Remedy"):
        take_part(kind, place_of(tmp_path, site, data_sets=sets))
    with pytest.raises(ConfigurationError, match="no file"):
        take_part(kind, place_of(tmp_path, site, data_sets=sets, consents={"exact_use_of_budgeted_data": True}))


# -- every other kind of job ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vertical", "alignment", "inference", "buckets"])
@pytest.mark.parametrize("strange", ["p0", None, "p\u200b1"])
def test_an_unusable_id_is_not_told(tmp_path: Path, kind: str, strange: str | None, stored_part: None) -> None:
    frame = table()
    frame.loc[5, "id"] = strange
    frame[["a", "b", "y", "id"]].to_parquet(tmp_path / "d.parquet")
    with pytest.raises(DataRefusal) as refusal:
        take_part(kind, place_of(tmp_path, data_sets={"d": {"path": "d.parquet", "id": "id"}}))
    assert str(refusal.value) == ROWS_TEXT and "id" in refusal.value.reason
    assert told(Memory(tmp_path / "registry", "site-1"), "SELECT question, data_set FROM refusals") == [
        ("refusals", "d")
    ]


def test_a_label_of_a_vertical_job_is_not_told(tmp_path: Path) -> None:
    for value in (np.nan, 7.0):
        with_value("y", value)(table())[["a", "b", "y", "id"]].to_parquet(tmp_path / "d.parquet")
        with pytest.raises(DataRefusal) as refusal:
            take_part("vertical", place_of(tmp_path, data_sets={"d": {"path": "d.parquet", "id": "id"}}))
        assert str(refusal.value) == ROWS_TEXT


def test_weights_of_a_vertical_job_are_not_told(tmp_path: Path) -> None:
    for value in (-1.0, 0.0):
        table().assign(w=value)[["a", "b", "w", "y", "id"]].to_parquet(tmp_path / "d.parquet")
        context = place_of(tmp_path, data_sets={"d": {"path": "d.parquet", "id": "id"}})
        with pytest.raises(DataRefusal) as refusal:
            run_vertical_site(vertical(weight="w"), context, None, 1.0, Silent())
        assert str(refusal.value) == ROWS_TEXT


# -- rows whose buckets were sent -------------------------------------------------------------------------------------


def test_rows_whose_buckets_were_sent_are_not_trained_on_or_evaluated_exactly(tmp_path: Path) -> None:
    for name, first in (("d", 0), ("e", 1000)):
        table().assign(id=[f"p{first + i}" for i in range(90)]).to_parquet(tmp_path / f"{name}.parquet")
    sets = {name: {"path": f"{name}.parquet", "id": "id"} for name in "de"}
    context = place_of(tmp_path, data_sets=sets)
    assert preparation.allow(job(data_set="d", eval_data_set="e"), context).load().eval_table.n_rows == 90
    SentRows(context.policy).note("earlier", ["p1007"], "another name")
    assert preparation.allow(job(data_set="d"), context).load().table.n_rows == 90
    for fields in ({"data_set": "e"}, {"data_set": "d", "eval_data_set": "e"}):
        with pytest.raises(DataRefusal) as refusal:
            preparation.allow(job(**fields), context).load()
        assert "were sent" in refusal.value.reason and "p1007" not in refusal.value.reason
        consenting = place_of(tmp_path, data_sets=sets, consents={"exact_use_of_budgeted_data": True})
        assert preparation.allow(job(**fields), consenting).load()
    nameless = place_of(tmp_path, data_sets={"d": {"path": "d.parquet"}})
    with pytest.raises(PolicyRefusal, match=r"data_sets\.d\.id"):
        preparation.allow(job(data_set="d"), nameless).load()


def test_buckets_are_sent_again_only_on_the_account_of_the_same_data_set(tmp_path: Path) -> None:
    """Two draws of noise average out: one ledger adds up what that costs, two do not."""
    sent = SentRows(place_of(tmp_path).policy)
    sent.note("first", ["p1", "p2"], "d")
    sent.refuse(["p1", "p3"], "d")
    sent.refuse(["p3"], "other")
    with pytest.raises(DataRefusal):
        sent.refuse(["p1", "p3"], "other")
    assert sent.sent(["p1", "p3", None]).tolist() == [True, False, True]
    # A note of an older release names no data set; the site's ledgers know more of it than this file.
    changed(Memory(tmp_path / "registry", "site-1"), "UPDATE sent_rows SET data_set = NULL")
    sent.refuse(["p1"], "other")
    with pytest.raises(DataRefusal):
        sent.refuse(["p1"])
