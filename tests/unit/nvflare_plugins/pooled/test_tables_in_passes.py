"""Tables that are never held whole: the same checks, search, models, metrics and memory of runs as of one held file."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import Silent
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import identify, named_rows, row_tags
from nvflare_plugins.data.table import Table, load_table
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.xgb import matrices
from nvflare_plugins.xgb.cuts import PassedValues, SortedValues, from_keys, search_quantiles
from nvflare_plugins.xgb.matrices import page_files, remove_left_behind
from tests.support.federation import Federation, succeed
from tests.support.refusals import refused

KEY = bytes(range(32))
COLORS = ["red", "green", "blue"]


def rows_of(n_rows: int = 900, seed: int = 4) -> pd.DataFrame:
    """Numbers with gaps, dates, categories of which one is in no list, texts that are true and false, labels, ids."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({f"x{i}": rng.normal(size=n_rows) for i in range(4)})
    frame["color"] = rng.choice(COLORS, n_rows)
    frame["flag"] = rng.choice(["true", "False"], n_rows)
    frame["since"] = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 999, n_rows), unit="D")
    frame["count"] = rng.integers(0, 5, n_rows)
    signal = frame.x0 + (frame.color == "red") + (frame.flag == "true") + rng.normal(size=n_rows) > 1
    frame["y"] = np.where(signal, "yes", "no")
    frame["w"] = rng.gamma(2, size=n_rows)
    frame["key"] = [f"row {number}" for number in range(n_rows)]
    for column, every in (("x0", 7), ("color", 11), ("flag", 5), ("since", 13), ("y", 17)):
        frame.loc[::every, column] = None
    return frame


def write_parts(folder: Path, frame: pd.DataFrame, n_parts: int = 4) -> None:
    folder.mkdir(parents=True)
    for number, rows in enumerate(np.array_split(np.arange(len(frame)), n_parts)):
        frame.iloc[rows].to_parquet(folder / f"{number:03}.parquet", index=False, row_group_size=60)


def loaded(path: Path, memory: str, **options: object) -> Table:
    spec = DataSet(
        "credit", path, "parquet", memory=memory, id="key", dates={"since": "YYYY-MM-DD"}, drop_unlabelled=True
    )
    columns = {"weight": "w", "categories": {"color": COLORS}, "label_classes": ["no", "yes"], **options}
    return load_table(spec, label="y", with_ids=True, may_lack_rows=True, takes_passes=True, **columns)  # type: ignore[arg-type]


@pytest.mark.parametrize("repair", [False, True])
def test_passes_read_what_a_held_table_holds(tmp_path: Path, repair: bool) -> None:
    write_parts(tmp_path / "parts", rows_of())
    whole, passed = (loaded(tmp_path / "parts", mode, repair=repair) for mode in ("whole", "passes"))
    assert passed.passes is not None and passed.features.size == 0 and whole.passes is None
    if repair:
        chosen = ~np.isnan(whole.label)
        whole, passed = whole.kept(chosen, "without a label"), passed.kept(chosen, "without a label")
    odd = np.arange(whole.n_rows) % 2 == 1
    for held, other in ((whole, passed), (whole.part(odd), passed.part(odd))):
        np.testing.assert_array_equal(other.by_feature[2], held.features[:, 2])
        assert other.n_rows == held.n_rows < 900 and other.n_missing == held.n_missing
        blocks = list(other.blocks(most_values=300))
        assert max(map(len, blocks)) <= 300 // 8 and all(block.flags.c_contiguous for block in blocks)
        np.testing.assert_array_equal(np.concatenate(blocks), held.features)
        np.testing.assert_array_equal(np.column_stack(list(other.columns())), held.features)
        np.testing.assert_array_equal(other.label, held.label)
        np.testing.assert_array_equal(other.weight, held.weight)
        spec = DataSet("credit", tmp_path / "parts", "parquet", id="key")
        (record, hashes), (record_2, hashes_2) = (identify(one, spec, KEY) for one in (held, other))
        assert record == record_2 and np.array_equal(hashes, hashes_2)
        named = named_rows(held, spec, KEY)
        assert named is not None and np.array_equal(named, named_rows(other, spec, KEY))
        np.testing.assert_array_equal(row_tags(held, KEY), row_tags(other, KEY))


def test_rows_in_another_order_are_the_same_to_registry_and_budgets(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", rows_of())
    whole, passed = (loaded(tmp_path / "parts", mode) for mode in ("whole", "passes"))
    order = np.random.default_rng(1).permutation(whole.n_rows)[:700]
    held, other = whole.taken(order), passed.taken(order)
    np.testing.assert_array_equal(np.column_stack(list(other.columns())), held.features)
    np.testing.assert_array_equal(other.label, held.label)
    places, blocks = zip(*other.placed_blocks(most_values=300), strict=True)
    np.testing.assert_array_equal(np.concatenate(blocks), held.features[np.concatenate(places)])
    spec = DataSet("credit", tmp_path / "parts", "parquet", id="key")
    ids = [b"%d" % row for row in order]
    (record, hashes), (record_2, hashes_2) = (identify(one, spec, KEY, ids) for one in (held, other))
    assert record == record_2 and np.array_equal(hashes, hashes_2)
    named = named_rows(held, spec, KEY)
    assert named is not None and np.array_equal(named, named_rows(other, spec, KEY))
    np.testing.assert_array_equal(row_tags(held, KEY), row_tags(other, KEY))
    with pytest.raises(ValueError, match="another order"):
        list(other.blocks())


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [("x1", np.inf, "infinite"), ("color", "pink", "public list"), ("flag", "7", "text"), ("w", -1.0, "negative")],
)
def test_one_row_is_refused_in_passes_as_in_a_held_table(
    tmp_path: Path, column: str, value: object, words: str
) -> None:
    frame = rows_of()
    frame.loc[899, column] = value
    write_parts(tmp_path / "parts", frame)
    for mode in ("whole", "passes"):
        with refused(words):
            loaded(tmp_path / "parts", mode)


def test_what_is_told_of_columns_does_not_depend_on_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frame = rows_of()
    frame["patient_id"] = np.arange(900) + 2**24 + 1
    write_parts(tmp_path / "parts", frame)
    told = []
    for mode in ("whole", "passes"):
        caplog.clear()
        with caplog.at_level(logging.INFO, "nvflare_plugins"):
            table = loaded(tmp_path / "parts", mode)
            list(table.blocks())
        told.append((table.notes, [record.getMessage() for record in caplog.records]))
    assert told[0] == told[1] and len(told[0][0]) == 1 and any("looks like an id" in line for line in told[0][1])


def test_a_file_that_changes_ends_the_next_pass(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", rows_of())
    table = loaded(tmp_path / "parts", "passes")
    rows_of(225, seed=5).to_parquet(tmp_path / "parts" / "002.parquet", index=False)
    for look in (table.blocks, table.columns):
        with refused("has changed, gone or come"):
            list(look())


def test_who_holds_rows_refuses_and_says_what_helps(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", rows_of())
    spec = DataSet("credit", tmp_path / "parts", "parquet")
    with pytest.raises(ConfigurationError, match=r'holds all rows at once.*data_sets\.credit\.memory \("whole"\)'):
        load_table(spec, label="w", features=["x1"])
    with pytest.raises(ConfigurationError, match=r"data_sets\.credit\.memory passes is for Parquet files"):
        DataSet("credit", tmp_path / "rows.csv", "csv", memory="passes")


# -- the search -------------------------------------------------------------------------------------------------------

_VALUE = st.one_of(st.floats(width=32, allow_infinity=False), st.sampled_from([0.0, -0.0, 1.0, np.nan, 1e-45]))


@given(
    st.lists(st.tuples(_VALUE, _VALUE), max_size=60),
    st.sampled_from([3, 8, 64]),
    st.sampled_from([None, 1, 4, 10]),
    st.integers(1, 9),
)
def test_the_search_in_passes_asks_for_the_same_counts(
    rows: list[tuple[float, float]], max_bin: int, min_rows: int | None, step: int
) -> None:
    table = np.array(rows, dtype=np.float32).reshape(-1, 2)
    asked: list[list[np.ndarray]] = []
    found = []
    passes = []

    def blocks():  # type: ignore[no-untyped-def]
        passes.append(1)
        padded = np.column_stack([table[:, 0], np.zeros(len(table), np.float32), table[:, 1]])
        yield from (padded[first : first + step] for first in range(0, len(table), step))

    for values in (SortedValues(table), PassedValues(blocks, [0, 2])):
        counts: list[np.ndarray] = []

        def note(count: np.ndarray, counts: list[np.ndarray] = counts) -> np.ndarray:
            counts.append(count)
            return 3 * count  # of other sites with the same rows

        found.append(search_quantiles(values, max_bin, min_rows, note).to_lists())
        asked.append(counts)
    assert found[0] == found[1] and len(passes) <= 5
    assert all(np.array_equal(*pair) for pair in zip(*asked, strict=True)) and len(asked[1]) == 33


def test_counts_up_to_any_keys(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    keys = np.concatenate([rng.integers(2**20, 2**32 - 2**23, 500), np.arange(2**31, 2**31 + 99)])[:, None]
    table = from_keys(keys.astype(np.uint32))
    held, passed = SortedValues(table), PassedValues(lambda: iter([table]), [0])
    for _ in range(5):
        asked = np.sort(rng.choice(keys[:, 0], 40))[None, :] + rng.integers(-1, 2, 40)
        np.testing.assert_array_equal(passed.up_to(asked), held.up_to(asked))


# -- whole jobs -------------------------------------------------------------------------------------------------------


def federation(folder: Path, mode: str, frame: pd.DataFrame, **data_set: object) -> Federation:
    """Three sites, whose training rows lie in folders and are read in one of three ways, and evaluation rows too."""
    made, data_set = Federation(folder), {"id": "key", "dates": {"since": "YYYY-MM-DD"}, **data_set}
    for number, site in enumerate(made.sites):
        (made.workspace(site) / "local").mkdir(parents=True)
        own = frame.iloc[number::3]
        sets = {}
        for name, rows in (("rows", own[: -len(own) // 4]), ("held_out", own[-len(own) // 4 :])):
            if mode == "file":
                rows.to_parquet(made.workspace(site) / f"{name}.parquet", index=False)
                sets[name] = {"path": f"{name}.parquet", **data_set}
            else:
                write_parts(made.workspace(site) / name, rows)
                sets[name] = {"path": name, "memory": mode, **data_set}
        made.set_policy(site, data_sets=sets)
    made.set_registry_keys()
    return made


def job_of(**changes: object) -> HorizontalJob:
    fields = {
        "data_set": "rows",
        "eval_data_set": "held_out",
        "evaluate_training": True,
        "label": "y",
        "weight": "w",
        "categories": {"color": COLORS},
        "label_classes": ["no", "yes"],
        "params": {"objective": "binary:logistic", "max_bin": 32, "max_depth": 4, "eval_metric": ["logloss", "auc"]},
        "num_rounds": 3,
        "profile": "plain",
    }
    return HorizontalJob.from_dict({**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"profile": "masks", "cuts": "exact", "eval_data_set": None, "weight": None},
        pytest.param(
            {"params": {"objective": "binary:logistic", "subsample": 0.5, "max_bin": 32}, "weight": None},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"params": {"objective": "binary:logistic", "grow_policy": "lossguide", "max_leaves": 6, "max_bin": 300}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["all", "masks", "sampled", "lossguide"],
)
def test_models_and_metrics_are_those_of_one_held_file(
    tmp_path: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrices, "_PAGE_VALUES", 400)
    found = {}
    for mode in ("file", "passes", "external"):
        sites = federation(tmp_path / mode, mode, rows_of(300), drop_unlabelled=True)
        succeed(sites.run(job_of(**changes)))
        found[mode] = sites.model(), sites.cuts().to_lists(), sites.metrics("site-2")
        assert not list((sites.workspace("site-1") / "runs").glob("*/pages"))
    assert found["file"] == found["passes"] == found["external"]


def test_the_registry_knows_rows_again_in_whatever_files(tmp_path: Path) -> None:
    frame = rows_of(300).dropna()
    sites = federation(tmp_path, "file", frame)
    # Without the consents that the federation gives for other tests.
    for site in sites.sites:
        sites.set_policy(site, consents={"plain_profile": True})
        own = pd.read_parquet(sites.workspace(site) / "rows.parquet")
        write_parts(sites.workspace(site) / "parts", own)
    job = job_of(eval_data_set=None, features=["x0", "x1", "color"])
    succeed(sites.run(job, "first"))
    sites.set_policies(data_sets={"rows": {"path": "parts", "id": "key"}})
    succeed(sites.run(job, "second"))
    assert sites.model("first") == sites.model("second")
    (sites.workspace("site-1") / "parts" / "000.parquet").unlink()
    outcomes = sites.run(job, "third")
    assert isinstance(outcomes["site-1"], ConfigurationError)


@pytest.mark.slow
def test_a_job_continues_a_model_in_passes(tmp_path: Path) -> None:
    models = []
    for mode in ("file", "external"):
        sites = federation(tmp_path / mode, mode, rows_of().dropna())
        succeed(sites.run(job_of(), "first"))
        more = {"data_set": "held_out", "eval_data_set": None, "continue_from": "first"}
        succeed(sites.run(job_of(**more), "second"))
        models.append((sites.model("second"), sites.record("site-1", "second").rounds[-1].metrics))
    assert models[0] == models[1]


@pytest.mark.slow
def test_pooled_metrics_are_counted_in_passes(tmp_path: Path) -> None:
    sections = []
    for mode in ("file", "passes"):
        sites = federation(tmp_path / mode, mode, rows_of(3000).dropna())
        sites.set_policies(consents={"plain_profile": True, "score_histogram": True})
        succeed(sites.run(job_of(pooled_metrics=True)))
        sections.append([section.rows for section in sites.record("site-1").sections])
    assert sections[0] == sections[1] and any(sections[0])


# -- files of bins ----------------------------------------------------------------------------------------------------


def test_pages_are_for_their_owner_alone_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "_PAGE_VALUES", 400)
    sites = federation(tmp_path, "external", rows_of(500).dropna())
    seen: list[tuple[str, int]] = []

    class Watch:
        def __call__(self, *_: object) -> None:
            for path in (tmp_path / "site-1" / "runs" / "job" / "pages").rglob("*"):
                seen.append((path.suffix if path.is_file() else "folder", stat.S_IMODE(path.stat().st_mode)))

        def say(self, *_: object) -> None:
            self()

        def __getattr__(self, name: str) -> object:
            return self

    before = os.umask(0o022)
    try:
        succeed(sites.run(job_of(), on_progress=lambda site: Watch() if site == "site-1" else Silent()))
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert {(".page", 0o600), ("folder", 0o700)} <= set(seen)
    assert all(mode in (0o600, 0o700) for _, mode in seen)
    assert not (tmp_path / "site-1" / "runs" / "job" / "pages").exists()


def test_pages_of_a_killed_process_go_when_the_next_run_begins(tmp_path: Path) -> None:
    (tmp_path / "killed" / "pages").mkdir(parents=True)
    for name in ("lock", "bins.page"):  # the system took the lock back
        (tmp_path / "killed" / "pages" / name).write_bytes(b"")
    (tmp_path / "lives").mkdir()
    with page_files(tmp_path / "lives") as folder:
        remove_left_behind(tmp_path)
        assert folder.exists() and not (tmp_path / "killed" / "pages").exists()
        with pytest.raises(ConfigurationError, match="in use by another process"), page_files(tmp_path / "lives"):
            pass
    assert not folder.exists()
    (tmp_path / "killed" / "pages").symlink_to(tmp_path / "lives")
    remove_left_behind(tmp_path)
    assert (tmp_path / "lives").exists()
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "pages").write_text("")
    for run in ("killed", "file"):
        with pytest.raises(ConfigurationError, match=r"is a link or a file.*Remedy"), page_files(tmp_path / run):
            pass
    assert (tmp_path / "lives").exists() and (tmp_path / "file" / "pages").exists()
