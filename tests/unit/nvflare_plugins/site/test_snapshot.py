"""Rows from a database into dated files: types, limits, secrets, read-only, and which file a data set reads."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as arrow_parquet
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.cli.main import main
from nvflare_plugins.data.declaration import DataSet, newest_in, snapshot_name, snapshots_in
from nvflare_plugins.data.identity import identify
from nvflare_plugins.data.table import load_table
from nvflare_plugins.site import snapshot
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.snapshot import take_snapshot

sqlalchemy = pytest.importorskip("sqlalchemy")
NOON = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC)
SECRET = "Gänse%füßchen@42"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A workspace with a database of loans."""
    with sqlite3.connect(tmp_path / "bank.db") as database:
        database.execute("CREATE TABLE loans (who TEXT, age INTEGER, amount REAL, town TEXT, opened TEXT, bad INTEGER)")
        rows = [
            (f"p{i}", None if i == 3 else 20 + i, i / 3, "Köln" if i % 2 else None, f"2026-01-0{i % 9 + 1}", i % 2)
            for i in range(40)
        ]
        database.executemany("INSERT INTO loans VALUES (?, ?, ?, ?, ?, ?)", rows)
    (tmp_path / "local").mkdir()
    write(tmp_path, {})
    return tmp_path


def write(workspace: Path, changes: dict) -> None:
    source = {"url": f"sqlite:///{workspace}/bank.db", "query": "SELECT * FROM loans ORDER BY who", "folder": "shots"}
    entry = {key: value for key, value in {**source, **changes}.items() if value is not None}
    document = {
        "snapshots": {"loans": entry},
        "data_sets": {"loans": {"path": "shots", "id": "who", "dates": {"opened": "YYYY-MM-DD"}}},
    }
    (workspace / "local" / "veilboost.json").write_text(json.dumps(document))


def source_of(workspace: Path, **changes: object):
    write(workspace, changes)
    return SitePolicy.load(workspace, "site-1").snapshots["loans"]


def command(workspace: Path, *arguments: str) -> int:
    return main(["snapshot", *arguments, "--workspace", str(workspace), "--site", "site-1"])


# -- the way of rows --------------------------------------------------------------------------------------------------


def test_from_the_database_to_what_a_job_reads(site, capsys):
    assert command(site, "loans") == 0
    said = capsys.readouterr().out
    (path,) = snapshots_in(site / "shots")
    assert f"{path}: 40 rows, 6 columns; the database held the query to reading" in said
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [one.name for one in path.parent.iterdir()] == [path.name]  # nothing half is left
    (site / "bank.db").unlink()  # no job needs it
    spec = SitePolicy.load(site, "site-1").data_sets["loans"]
    table = load_table(spec, label="bad", categories={"town": ["Köln"]}, with_ids=True)
    assert table.feature_names == ("age", "amount", "town", "opened") and table.n_rows == 40
    by_name = dict(zip(table.feature_names, table.n_missing, strict=True))
    assert by_name == {"age": 1, "amount": 0, "town": 20, "opened": 0}
    assert command(site) == 0
    assert f"loans: 1 snapshot in {site / 'shots'}" in capsys.readouterr().out


def test_a_data_set_reads_the_latest_by_name_whatever_the_files_times_are(site):
    source = source_of(site)
    older = take_snapshot(source, now=lambda: NOON).path
    with sqlite3.connect(site / "bank.db") as database:
        database.execute("DELETE FROM loans WHERE age > 30")  # the missing one stays
    newer = take_snapshot(source, now=lambda: NOON + timedelta(seconds=1)).path
    os.utime(older, (2e9, 2e9))
    spec = SitePolicy.load(site, "site-1").data_sets["loans"]
    assert spec.files == (newer,) and load_table(spec, label="bad", features=["age"]).n_rows == 11
    assert spec.path == site / "shots"  # what the site remembers of the data set goes by the folder
    (site / "shots" / "loans-20991231T000000Z.parquet").symlink_to(older)
    (site / "shots" / "loans-20991231T000000Z.csv").write_text("a\n1\n")
    assert spec.files == (newer,)
    (site / "shots" / "other-20991231T000000Z.parquet").write_bytes(newer.read_bytes())
    with pytest.raises(ConfigurationError, match="several names"):
        _ = spec.files


def test_an_empty_folder_is_refused_with_the_remedy(site):
    (site / "shots").mkdir()
    with pytest.raises(ConfigurationError, match="`veilboost snapshot`"):
        load_table(SitePolicy.load(site, "site-1").data_sets["loans"], label="bad")


def test_older_ones_are_removed_only_where_asked_and_of_this_name_alone(site, capsys):
    source = source_of(site)
    for seconds in range(4):
        take_snapshot(source, now=lambda s=seconds: NOON + timedelta(seconds=s))
    other = site / "shots" / snapshot_name("other", NOON)
    other.write_bytes(b"")
    assert command(site, "loans", "--keep", "2") == 0
    assert capsys.readouterr().out.count(": removed\n") == 3
    assert other.exists() and sum(name == "loans" for name in snapshots_in(site / "shots").values()) == 2
    assert command(site, "loans", "--keep", "0") == 1
    with pytest.raises(ConfigurationError, match="very second"):
        now = datetime.now(UTC)
        take_snapshot(source, now=lambda: now)
        take_snapshot(source, now=lambda: now)


def test_two_data_sets_must_not_share_a_snapshot(site):
    path = take_snapshot(source_of(site)).path
    document = json.loads((site / "local" / "veilboost.json").read_text())
    document["data_sets"]["again"] = {"path": str(path)}
    (site / "local" / "veilboost.json").write_text(json.dumps(document))
    with pytest.raises(ConfigurationError, match="are one file"):
        SitePolicy.load(site, "site-1")


# -- types ------------------------------------------------------------------------------------------------------------


def read_column(batches: Sequence[Sequence[object]], site: Path) -> pa.ChunkedArray:
    source = source_of(site)
    arrays = [snapshot._array(source, "x", batch) for batch in batches]
    wanted = pa.field("x", snapshot._joined(source, "x", [array.type for array in arrays]))
    return pa.chunked_array([snapshot._cast(source, array, wanted) for array in arrays], wanted.type)


@pytest.mark.parametrize(
    ("batches", "kind", "values"),
    [
        ([[1, None], [None, 2]], pa.int64(), [1, None, None, 2]),
        ([[None, None], [1.5]], pa.float64(), [None, None, 1.5]),
        ([[1], [2.5]], pa.float64(), [1.0, 2.5]),
        ([["Köln", None], [None]], pa.string(), ["Köln", None, None]),
        ([[True], [False, None]], pa.bool_(), [True, False, None]),
        ([[date(2026, 1, 2)], [None]], pa.date32(), [date(2026, 1, 2), None]),
        ([[datetime(2026, 1, 2, 3)]], pa.timestamp("us"), [datetime(2026, 1, 2, 3)]),
        (
            [[Decimal("1.25"), Decimal("NaN")], [Decimal("12345.6")]],
            pa.decimal128(7, 2),
            [Decimal("1.25"), None, Decimal("12345.60")],
        ),
        ([[UUID(int=5)]], pa.string(), [str(UUID(int=5))]),
        ([], pa.null(), []),
    ],
    ids=str,
)
def test_types_are_kept_over_batches(site, batches, kind, values):
    found = read_column(batches, site)
    assert found.type == kind and found.to_pylist() == values


@pytest.mark.parametrize(
    "batches", [[[1, "x"]], [[1], ["x"]], [[b"x"]], [[1 << 70]], [[date(2026, 1, 1)], [1]]], ids=str
)
def test_what_no_column_can_hold_is_refused_without_a_value(site, batches):
    with pytest.raises(ConfigurationError, match="column 'x' values of several types") as refused:
        read_column(batches, site)
    assert str(1 << 70) not in str(refused.value)


def test_many_batches_are_one_table(site, monkeypatch):
    monkeypatch.setattr(snapshot, "_BATCH_ROWS", 7)
    path = take_snapshot(source_of(site)).path
    table = arrow_parquet.read_table(path)
    assert table.num_rows == 40 and table.column("age").null_count == 1 and table.schema.field("age").type == pa.int64()
    np.testing.assert_allclose(np.sort(table.column("amount").to_numpy()), np.arange(40) / 3)


QUERIES = {
    "gaps": "SELECT * FROM loans ORDER BY age",
    "a column without a value": "SELECT *, NULL AS empty FROM loans ORDER BY who",
    "whole numbers first, then others": "SELECT who, CASE WHEN bad THEN amount ELSE age END AS mixed, bad FROM loans",
    "no rows": "SELECT * FROM loans WHERE age > 1000",
}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_some_rows_at_a_time_are_what_all_at_once_are(site, monkeypatch, query):
    source = source_of(site, query=query)
    whole = take_snapshot(source, now=lambda: NOON).path
    monkeypatch.setattr(snapshot, "_BATCH_ROWS", 3)
    monkeypatch.setattr(snapshot, "_GROUP_VALUES", 60)
    parts = take_snapshot(source, now=lambda: NOON + timedelta(seconds=1)).path
    tables = [arrow_parquet.read_table(path) for path in (whole, parts)]
    assert tables[0].schema == tables[1].schema and tables[0].to_pydict() == tables[1].to_pydict()
    groups = [arrow_parquet.ParquetFile(path).metadata.num_row_groups for path in (whole, parts)]
    assert groups[1] == 1 if not tables[0].num_rows else groups[1] > groups[0] == 1
    assert stat.S_IMODE(parts.stat().st_mode) == 0o600 and len(list(parts.parent.iterdir())) == 2
    with sqlite3.connect(site / "bank.db") as database:
        cursor = database.execute(query)
        names = [one[0] for one in cursor.description]
        assert tables[1].to_pylist() == [dict(zip(names, row, strict=True)) for row in cursor]
    if tables[0].num_rows:
        features = [name for name in ("age", "amount", "mixed", "empty") if name in names]
        spec = DataSet("loans", site / "shots", "parquet")
        loaded = [load_table(replace(spec, path=path), label="bad", features=features) for path in (whole, parts)]
        (one, hashes), (other, same) = (identify(table, spec, b"k" * 32) for table in loaded)
        assert one == other and np.array_equal(hashes, same)


def test_too_late_a_refusal_leaves_nothing(site, monkeypatch):
    monkeypatch.setattr(snapshot, "_BATCH_ROWS", 3)
    with pytest.raises(ConfigurationError, match="more than 39 rows"):
        take_snapshot(source_of(site, max_rows=39))
    assert not (site / "shots").exists()
    (site / "shots").mkdir()
    values = "SELECT CASE WHEN bad THEN 'x' ELSE age END AS mixed FROM loans ORDER BY bad"
    with pytest.raises(ConfigurationError, match="several types"):
        take_snapshot(source_of(site, query=values))
    assert list((site / "shots").iterdir()) == []


# -- what is refused, and what is never said --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"query": "DELETE FROM loans"}, "SELECT or WITH"),
        ({"query": "WITH a AS (SELECT 1) INSERT INTO loans (who) SELECT 'x'"}, "OperationalError"),
        ({"query": "  selection"}, "SELECT or WITH"),
        ({"url": "sqlite:///{site}/bank.db?timeout=hunter2"}, "snapshots.loans.url"),
        ({"query": "SELECT nothing FROM loans"}, "snapshots.loans.url and snapshots.loans.query"),
        ({"query": "SELECT age, age FROM loans"}, "two columns the name 'age'"),
        ({"max_rows": 39}, "more than 39 rows"),
        ({"url": "sqlite:///nowhere.db"}, "not there"),
        ({"url": "nonsense"}, "none of SQLAlchemy's"),
        ({"url": f"postgresql://reader:{SECRET.replace('@', '')}@db/records"}, "an address without a password"),
        ({"url": f"postgresql://reader@db/records?password={SECRET}"}, "an address without a password"),
        ({"password_env": "VEILBOOST_NO_SUCH"}, "VEILBOOST_NO_SUCH, which is not set"),
        ({"password_file": "nowhere"}, "cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_refusals_write_nothing_and_quote_nothing(site, changes, said, caplog, capsys):
    write(
        site,
        {key: str(value).replace("{site}", str(site)) if key == "url" else value for key, value in changes.items()},
    )
    assert command(site, "loans") == 1
    told = capsys.readouterr()
    assert said in told.err and not (site / "shots").exists()
    for text in (told.err, told.out, caplog.text):
        assert "füßchen" not in text and "nothing FROM" not in text and "Traceback" not in text
    with sqlite3.connect(site / "bank.db") as database:
        assert database.execute("SELECT COUNT(*) FROM loans").fetchone() == (40,)


@pytest.mark.parametrize("changes", [{"password_env": "A", "password_file": "b"}, {"query": None}, {"user": "me"}])
def test_a_policy_that_says_too_much_or_too_little_is_refused(site, changes):
    with pytest.raises(ConfigurationError, match=r"snapshots\.loans"):
        source_of(site, **changes)


def test_a_password_file_that_others_may_read_is_refused(site):
    (site / "password").write_text(SECRET + "\n")
    (site / "password").chmod(0o640)
    where = "password"
    with pytest.raises(ConfigurationError, match="chmod 600"):
        take_snapshot(source_of(site, password_file=where))


@pytest.mark.parametrize("by_file", [True, False])
def test_the_password_reaches_the_driver_and_nothing_else(site, by_file, monkeypatch, capsys, caplog):
    """The driver fails with a text that quotes address and password, as some do."""
    seen, create = [], sqlalchemy.create_engine

    def engine(url: object, **options: object) -> object:
        def connect() -> None:
            seen.append(url.password)
            raise sqlite3.OperationalError(f"no route for reader:{SECRET} to db")

        return create(f"sqlite:///{site}/bank.db", creator=connect, **options)

    monkeypatch.setattr(sqlalchemy, "create_engine", engine)
    (site / "password").write_text(SECRET + "\n")
    (site / "password").chmod(0o600)
    monkeypatch.setenv("LOANS_PASSWORD", SECRET)
    where = {"password_file": "password"} if by_file else {"password_env": "LOANS_PASSWORD"}
    write(site, {"url": "postgresql://reader@db/records", **where})
    assert command(site, "loans") == 1
    assert seen == [SECRET]
    told = capsys.readouterr()
    assert "OperationalError" in told.err and SECRET not in told.err + told.out + caplog.text
    assert not [path for path in site.rglob("*") if path.is_file() and path.name != "password" and _holds(path)]


def test_what_a_driver_says_of_options_that_it_does_not_know_is_no_traceback(site, monkeypatch, capsys):
    create = sqlalchemy.create_engine

    def connect() -> None:
        raise TypeError(f"connect() got an unexpected keyword argument '{SECRET}'")

    monkeypatch.setattr(sqlalchemy, "create_engine", lambda url, **options: create(url, creator=connect, **options))
    assert command(site, "loans") == 1
    told = capsys.readouterr().err
    assert "TypeError" in told and "snapshots.loans.url" in told and SECRET not in told


def _holds(path: Path) -> bool:
    return SECRET.encode() in path.read_bytes()


def test_site_setup_writes_what_snapshot_reads(site, capsys):
    (site / "local" / "veilboost.json").unlink()
    arguments = [
        *("--snapshot", f"loans=sqlite:///{site}/bank.db", "--snapshot-query", "loans=SELECT age, bad FROM loans"),
        *("--snapshot-folder", f"loans={site}/shots", "--data-set", f"loans={site}/shots"),
    ]
    assert main(["site-setup", str(site), *arguments]) == 0
    assert command(site, "loans", "--keep", "1") == 0
    assert "40 rows, 2 columns" in capsys.readouterr().out
    spec = SitePolicy.load(site, "site-1").data_sets["loans"]
    assert spec.format == "parquet" and (newest_in(spec.path, "loans"),) == spec.files
    assert load_table(spec, label="bad").n_rows == 40


def test_site_setup_refuses_a_query_that_writes(site, capsys):
    before = (site / "local" / "veilboost.json").read_text()
    arguments = ["--snapshot", f"loans=sqlite:///{site}/bank.db", "--snapshot-query", "loans=DELETE FROM loans"]
    assert main(["site-setup", str(site), *arguments]) == 1
    assert "snapshots.loans.query" in capsys.readouterr().err
    assert (site / "local" / "veilboost.json").read_text() == before


@pytest.mark.parametrize(
    "url", [f"postgresql://reader:{SECRET}@db/records", "mysql://r:p@h", "mysql://h/x?passwd=p", "x://u:a/b@c@h/d"]
)
def test_site_setup_neither_writes_nor_prints_a_password(site, url, capsys):
    before = (site / "local" / "veilboost.json").read_text()
    assert main(["site-setup", str(site), "--snapshot", f"loans={url}"]) == 1
    told = capsys.readouterr()
    assert "snapshots.loans.url" in told.err and url not in told.err + told.out
    assert (site / "local" / "veilboost.json").read_text() == before


@pytest.mark.parametrize(
    "url", ["sqlite:////data/a:b.db", "postgresql+psycopg://reader@db:5432/records?sslmode=require"]
)
def test_addresses_without_a_password_are_taken(site, url):
    assert source_of(site, url=url).url == url


def test_an_unknown_name_is_refused(site, capsys):
    assert command(site, "loan") == 1
    assert "known: loans" in capsys.readouterr().err
