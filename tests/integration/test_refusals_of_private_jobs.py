"""Private jobs on neighbouring data sets, one of which has a row that exact jobs refuse: others see no difference.

One row could decide what every site read, before ledger and session: a weight column of zeros, a missing label, one
outside the list, 1e39, text in a column of numbers. What leaves a site must be alike up to noise and keys, and so must
what is written about it for others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.base.errors import ROWS_TEXT, DataRefusal, PolicyRefusal
from nvflare_plugins.kinds.dpboost.job import DpBoostJob
from nvflare_plugins.kinds.dpboost.training import prepare as prepare_dpboost
from nvflare_plugins.kinds.private_trees.training import prepare as prepare_trees
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.data_refusals import RefusalCount
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.envelope import unpack
from tests.support.private_federation import BUDGET, DATA, PrivateFederation, frame_of, job_of

HEADER = "x0,x1,x2,x3,colour,label,w"
ROWS = ("0.5,1,-1,0,red,1,1", "-0.5,0.25,1,2,green,0,2", "1,,2,0.5,blue,1,0.5", "0,0,0,0,red,0,1", "1,1,2,-2,green,1,1")
STRANGE = {
    "a label is missing": "0,0,0,0,red,,1",
    "a label is outside the list": "0,0,0,0,red,7,1",
    "a label is text": "0,0,0,0,red,yes,1",
    "a value beyond float32": "1e39,0,0,0,red,1,1",
    "an infinite value": "-inf,0,0,0,red,1,1",
    "text among numbers": "0,abc,0,0,red,1,1",
    "true among numbers": "0,true,0,0,red,1,1",
    "an unknown category": "0,0,0,0,violet,1,1",
    "a missing weight": "0,0,0,0,red,1,",
    "a negative weight": "0,0,0,0,red,1,-3",
    "a field too many": "0,0,0,0,red,1,1,99",
    "not UTF-8": "0,0,0,0,r\udcff,1,1",
    "an open quotation mark": '0,"abc,0,0,red,1,1',
    "an open quotation mark at the end": '0,0,0,0,r"ed,1,"1',
    "a quoted value": '0,"0",0,0,"red",1,1',
    "a line break within quotation marks": '0,0,0,0,"red\n1,1,1,1,red",1,1',
    "an endless line": f"0,0,0,0,{'r' * 3_000_000},1,1",
    "an ordinary row": "0,0,0,0,red,1,1",
}
TREES = {"components": {"n_trees": 2, "depth": 2}, "features": ["x0", "x1", "x2", "x3", "colour"]}


def write(path: Path, rows: Sequence[str], header: str = HEADER) -> None:
    path.write_text("".join(f"{line}\n" for line in (header, *rows)), encoding="utf-8", errors="surrogateescape")


def federation_of(folder: Path, rows: Sequence[str], **facts: object) -> PrivateFederation:
    """Three sites, the first of which has these rows in a CSV file."""
    folder.mkdir(exist_ok=True)
    federation = PrivateFederation(folder, frame_of(60).assign(w=1.0), share_data_errors=True)
    write(federation.workspace("site-1") / f"{DATA}.csv", rows)
    federation.set_policy("site-1", data_sets={DATA: {"path": f"{DATA}.csv", "privacy": BUDGET, **facts}})
    return federation


def shown(folder: Path, rows: Sequence[str], job: dict, **facts: object) -> dict:
    """Return what others see of a job up to randomness: frames by kind and size, outcomes, and the evidence."""
    federation = federation_of(folder, rows, **facts)
    run = federation.run_private(job_of(**{**TREES, **job}))
    run.succeed()
    frames = [(site, unpack(data)) for site, data in run.frames]
    by_site = {
        site: [(f.kind.name, str(f.moment), f.codec.name, f.n_values, len(f.payload)) for of, f in frames if of == site]
        for site in federation.sites
    }
    outcomes = {site: outcome.summary for site, outcome in run.outcomes.items()}
    evidence = {
        site: [_fixed(record) for record in _records(federation.workspace(site) / "runs" / "job" / "evidence")]
        for site in federation.sites
    }
    if job.get("method") != "dp_rf":  # how far a greedy tree grows depends on the noise, which others see anyway
        by_site = {site: [frame for frame in sent if frame[1].startswith("setup")] for site, sent in by_site.items()}
        evidence = {site: [r for r in records if r.get("phase") == "setup:0"] for site, records in evidence.items()}
        if not all(map(len, [*by_site.values(), *evidence.values()])):
            raise AssertionError("nothing is left to compare")
    return {"frames": by_site, "outcomes": outcomes, "evidence": evidence}


def _records(folder: Path) -> list[dict]:
    (path,) = [path for path in folder.iterdir() if not path.name.endswith(".salts")]
    return [json.loads(line) for line in path.read_text().splitlines()]


def _fixed(record: dict) -> dict:
    """Return what of a record is neither a hash nor a key nor a time; lengths of those must be alike all the same."""
    dropped = (*_OF_THE_RUN, "size") if record["type"] == "model" else _OF_THE_RUN
    return {
        name: len(str(value)) if name in _RANDOM else value for name, value in record.items() if name not in dropped
    }


_RANDOM = ("hash", "sha256", "hmac", "policy_hash", "parameters_hash", "public_keys", "heads")
_OF_THE_RUN = ("time", "started", "attempt", "certificates")


TRAINERS = {
    "own": {},
    "refreshed": {"method": "dp_rf", "components": {"n_trees": 2, "depth": 2, "candidates": "uniform"}},
    "xgboost": {"method": "dp_tr_newton", "components": {"n_trees": 1, "grower": "xgboost"}},
}
FILES = {
    "strange rows": [*ROWS, *STRANGE.values()],
    "no rows": [],
    "one class": ["0.5,1,-1,0,red,1,1", "-0.5,0.25,1,2,green,1,2"],
    "no usable row": ["0,0,0,0,red,7,1"],
    "weights of zeros": [f"{row.rpartition(',')[0]},0" for row in ROWS],
    "a row more than max_rows": [*ROWS, ROWS[0]],
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_others_see_the_same_whatever_rows_a_site_has(
    tmp_path: Path, trainer: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = {"weight": "w", "max_weight": 2.0, **TRAINERS[trainer]}
    usual = shown(tmp_path / "usual", ROWS, job, max_rows=len(ROWS))
    for number, name in enumerate(FILES if trainer == "refreshed" else list(FILES)[:3]):
        assert shown(tmp_path / str(number), FILES[name], job, max_rows=len(ROWS)) == usual, name
    for folder in tmp_path.iterdir():
        assert RefusalCount(SitePolicy.load(folder / "site-1", "site-1")).counts() == {}, "no refusal took place at all"
    assert "takes part without rows" in caplog.text and "are of one class" in caplog.text, "in the site's own log"


def place_of(folder: Path) -> SiteContext:
    policy = SitePolicy.load(folder / "site-1", "site-1")
    return SiteContext("site-1", policy_sites, "job", bytes(16), folder / "runs", policy, Identity.unsigned("site-1"))


policy_sites = ("site-1", "site-2", "site-3")


@pytest.mark.parametrize("strange", STRANGE)
def test_a_row_changes_nothing_about_the_others(tmp_path: Path, strange: str) -> None:
    """Sensitivities count what one row changes: it is repaired, or left out, by itself."""
    federation = federation_of(tmp_path, ROWS)
    job = job_of(**TREES, weight="w", max_weight=2.0)
    before = prepare_trees(job, place_of(tmp_path))
    without = before.rows
    path = federation.workspace("site-1") / f"{DATA}.csv"
    for context in (0, 2, len(ROWS)):
        write(path, [*ROWS[:context], STRANGE[strange], *ROWS[context:]])
        after = prepare_trees(job, place_of(tmp_path))
        found = after.rows
        extra = found.label.size - without.label.size
        assert extra in (0, 1)
        if extra:
            all_rows = (found.columns, found.label, found.weights)
            found_columns, label, weights = (np.delete(part, context, -1) for part in all_rows)
        else:
            found_columns, label, weights = found.columns, found.label, found.weights
        np.testing.assert_array_equal(found_columns, without.columns)
        np.testing.assert_array_equal(label, without.label)
        np.testing.assert_array_equal(weights, without.weights)
        assert np.isfinite(found.label).all() and (found.weights >= 0).all()
        assert after.plan == before.plan and after.schema == before.schema


def test_what_remains_is_a_fixed_text_though_the_site_shares_reasons(tmp_path: Path) -> None:
    federation = federation_of(tmp_path, ROWS)
    (federation.workspace("site-1") / f"{DATA}.csv").write_bytes(b"")
    run = federation.run_private(job_of(**TREES))
    assert isinstance(run.error("site-1"), DataRefusal) and all(site != "site-1" for site, _ in run.frames)
    assert {str(error) for error in run.outcomes.values()} <= {ROWS_TEXT, f"site-1: {ROWS_TEXT}"}


def test_rows_under_local_noise_report_though_the_job_cannot_use_them(tmp_path: Path) -> None:
    """The noise on a site's sum must not tell how many of its rows had a label."""
    federation_of(tmp_path, [*ROWS, *STRANGE.values()])
    prepared = prepare_trees(job_of(**TREES, trust="local", n_rows=200), place_of(tmp_path))
    assert prepared.n_reports == len(ROWS) + len(STRANGE) - 4 > prepared.rows.label.size  # four lines are skipped


def test_rows_whose_buckets_were_sent_are_left_out_and_rows_without_ids_refused(tmp_path: Path) -> None:
    header, rows = f"{HEADER},id", [f"{row},p{number}" for number, row in enumerate(ROWS)]
    federation = federation_of(tmp_path, rows, id="id")
    path = federation.workspace("site-1") / f"{DATA}.csv"
    write(path, [*rows, f"{ROWS[0]},"], header)
    job = job_of(**TREES)
    assert prepare_trees(job, place_of(tmp_path)).rows.label.size == len(rows) + 1  # nothing was sent: no id is needed
    SentRows(place_of(tmp_path).policy).note("earlier", ["p1", "p3"], "another name")
    left = prepare_trees(job, place_of(tmp_path)).rows
    assert left.label.tolist() == [1, 1, 1]  # neither those two nor the row that may be any
    # Left out without a word, so that nobody learns from a refusal whether a person is there.
    assert federation.run_private(job).succeed()
    entry = {"path": f"{DATA}.csv", "privacy": BUDGET}
    federation.set_policy("site-1", data_sets={DATA: entry})
    with pytest.raises(PolicyRefusal, match=f"data_sets.{DATA}.id"):
        prepare_trees(job, place_of(tmp_path))
    path.unlink()  # what has no ids is refused before anything is read
    with pytest.raises(PolicyRefusal, match=r"consents.exact_use_of_budgeted_data"):
        prepare_trees(job.from_dict({**job.to_dict(), "features": None}), place_of(tmp_path))


# -- DPBoost ----------------------------------------------------------------------------------------------------------

DPBOOST = {
    "data_set": DATA,
    "label": "label",
    "epsilon": 1.0,
    "feature_bounds": {"x0": [-3, 3], "x1": [-3, 3]},
    "categories": {"colour": ["red", "green", "blue"]},
    "n_trees": 2,
    "depth": 2,
}
IDS = {
    "no id": "",
    "an id twice": "p0",
    "an invisible id": "p\u200b1",
    "a missing id": "NA",
    "an endless id": "p" * 2000,
    "an ordinary id": "other",
}


@pytest.mark.parametrize("strange", [*STRANGE, *IDS])
def test_dpboost_repairs_rows_by_themselves_too(tmp_path: Path, strange: str) -> None:
    header, rows = f"{HEADER},id", [f"{row},p{number}" for number, row in enumerate(ROWS)]
    federation = federation_of(tmp_path, ROWS, id="id")
    path = federation.workspace("site-1") / f"{DATA}.csv"
    write(path, rows, header)
    without = prepare_dpboost(DpBoostJob(**DPBOOST), place_of(tmp_path))
    row = f"{ROWS[0]},{IDS[strange]}" if strange in IDS else f"{STRANGE[strange]},q"
    for context in (0, len(rows)):
        write(path, [*rows[:context], row, *rows[context:]], header)
        found = prepare_dpboost(DpBoostJob(**DPBOOST), place_of(tmp_path))
        kept = np.ones(found.label.size, dtype=bool)
        if found.label.size > without.label.size:
            kept[context] = False
        assert kept.sum() == without.label.size
        np.testing.assert_array_equal(found.columns[:, kept], without.columns)
        np.testing.assert_array_equal(found.label[kept], without.label)
        assert [name for name, keep in zip(found.record_ids, kept, strict=True) if keep] == list(without.record_ids)
    write(path, [], header)
    assert prepare_dpboost(DpBoostJob(**DPBOOST), place_of(tmp_path)).label.size == 0
