"""Data sets of many Parquet files: their order, what is refused, and what is noticed while reading."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import Relation, identify
from nvflare_plugins.data.parquet_parts import ParquetParts
from nvflare_plugins.data.table import load_table
from nvflare_plugins.site.policy import SitePolicy
from tests.support.refusals import refused_for

KEY = bytes(range(32))
N_ROWS = 700


def frame() -> pd.DataFrame:
    rng = np.random.default_rng(1)
    rows = pd.DataFrame({"größe": rng.normal(size=N_ROWS), "color": rng.choice(["red", "blue"], N_ROWS)})
    rows["n"] = np.arange(N_ROWS)
    rows.loc[::9, "größe"] = np.nan
    rows["y"] = rng.integers(0, 2, N_ROWS)
    return rows


def spec_of(path: Path, **more: object) -> DataSet:
    return DataSet("credit", path, "parquet", **{"memory": "whole", **more})  # type: ignore[arg-type]


def in_parts(folder: Path, rows: pd.DataFrame, ends: tuple[int, ...] = (100, 130, 555, N_ROWS)) -> DataSet:
    """Write rows into files whose names, sorted, give their order; row groups are smaller than files."""
    folder.mkdir()
    start = 0
    for number, end in enumerate(ends):
        rows[start:end].to_parquet(folder / f"part-{number:02}.parquet", row_group_size=70, index=False)
        start = end
    return spec_of(folder)


def reason(spec: DataSet, **options: object) -> str:
    with pytest.raises(ConfigurationError) as found:
        load_table(spec, label="y", categories={"color": ["red", "blue"]}, **options)  # type: ignore[arg-type]
    assert str(spec.path) not in str(found.value)
    return found.value.reason if isinstance(found.value, DataRefusal) else str(found.value)


@pytest.mark.parametrize("pattern", ["", "*.parquet", "part-0[0-3].p*"])
def test_a_folder_reads_as_one_file_and_is_the_same_data(tmp_path: Path, pattern: str) -> None:
    rows = frame()
    rows.to_parquet(tmp_path / "whole.parquet", index=False)
    folder = in_parts(tmp_path / "parts", rows).path
    (folder / "_SUCCESS").write_bytes(b"")
    (folder / ".part-00.parquet.crc").write_bytes(b"crc")
    specs = [spec_of(tmp_path / "whole.parquet"), spec_of(folder / pattern if pattern else folder)]
    tables = [load_table(spec, label="y", categories={"color": ["red", "blue"]}) for spec in specs]
    np.testing.assert_array_equal(tables[0].features, tables[1].features)
    np.testing.assert_array_equal(tables[0].label, tables[1].label)
    (one, hashes), (other, others) = (identify(*pair, KEY) for pair in zip(tables, specs, strict=True))
    assert one.fingerprint == other.fingerprint and one.columns == other.columns
    assert other.relation(one, 0) is Relation.SAME and np.array_equal(hashes, others)


def test_the_order_is_that_of_names(tmp_path: Path) -> None:
    for name in ("part-2", "part-10", "Z", "ä"):
        pd.DataFrame({"name": [name]}).to_parquet(tmp_path / f"{name}.parquet")
    assert ParquetParts(spec_of(tmp_path)).read(["name"])["name"].to_pylist() == ["Z", "part-10", "part-2", "ä"]


def test_rows_are_read_by_number(tmp_path: Path) -> None:
    spec, expected = in_parts(tmp_path / "parts", frame()), frame()
    parts = ParquetParts(spec)
    assert parts.n_rows == N_ROWS and parts.schema.names == ["größe", "color", "n", "y"]
    rng = np.random.default_rng(2)
    runs = np.sort([rng.choice(N_ROWS, 2, replace=False) for _ in range(40)])
    for first, end in [(0, N_ROWS), (99, 131), *runs.tolist()]:
        found = ParquetParts.as_told(spec, parts.parts_of(first, end), (first, end)).read(["n", "color"])
        assert found.column_names == ["n", "color"]
        assert found["n"].to_pylist() == list(range(first, end))
        assert found["color"].to_pylist() == expected["color"][first:end].tolist()
    batches = [batch["n"].to_pylist() for batch in parts.batches(["n"], most_rows=50)]
    assert max(map(len, batches)) == 50 and [n for batch in batches for n in batch] == list(range(N_ROWS))


def test_names_that_are_empty_or_have_points(tmp_path: Path) -> None:
    columns = {"": [1.0, 2.0], "a.b": [3.0, 4.0], "a": [5.0, 6.0], "ü ö": [7.0, 8.0], "y": [0, 1]}
    for number in range(2):
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet")
    table = load_table(spec_of(tmp_path, rename={"": "nameless"}), label="y")
    assert table.feature_names == ("nameless", "a.b", "a", "ü ö")
    np.testing.assert_array_equal(table.features, [[1, 3, 5, 7], [2, 4, 6, 8]] * 2)
    assert "printable" in reason_of_names(spec_of(tmp_path))


def reason_of_names(spec: DataSet) -> str:
    with pytest.raises(ConfigurationError) as found:
        load_table(spec, label="y")
    return str(found.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows.rename(columns={"n": "m"}), "columns of other names"),
        (lambda rows: rows.assign(more=1), "columns of other names"),
        (lambda rows: rows[["n", "größe", "color", "y"]], "in another order"),
        (lambda rows: rows.assign(n=rows["n"].astype(float)), "another type"),
    ],
)
def test_files_of_another_schema_are_refused(tmp_path: Path, change: object, words: str) -> None:
    spec = in_parts(tmp_path / "parts", frame())
    change(frame()).to_parquet(spec.path / "part-99.parquet", index=False)  # type: ignore[operator]
    text = reason(spec)
    assert words in text and "file 5 by name" in text and "data_sets.credit.path" in text


def test_columns_that_may_and_may_not_lack_values_go_together(tmp_path: Path) -> None:
    for number, nullable in enumerate((True, False)):
        schema = pa.schema([pa.field("x", pa.float64(), nullable), pa.field("y", pa.int64(), nullable)])
        pq.write_table(pa.table({"x": [1.0, 2.0], "y": [0, 1]}, schema=schema), tmp_path / f"{number}.parquet")
    assert load_table(spec_of(tmp_path), label="y").n_rows == 4


def test_categories_of_files_with_dictionaries_of_their_own(tmp_path: Path) -> None:
    for number, texts in enumerate((["red", "blue"], ["blue", "green"])):
        column = pa.array(texts).dictionary_encode()
        pq.write_table(pa.table({"color": column, "y": [0, 1]}), tmp_path / f"{number}.parquet")
    table = load_table(spec_of(tmp_path), label="y", categories={"color": ["green", "blue", "red"]})
    assert table.features[:, 0].tolist() == [2, 1, 1, 0]


def test_what_is_no_data_is_refused(tmp_path: Path) -> None:
    assert "without a file" in reason(spec_of(tmp_path)) and "without a file" in reason(spec_of(tmp_path / "*.parquet"))
    assert "no file at its path" in reason(spec_of(tmp_path / "gone.parquet"))
    spec = in_parts(tmp_path / "parts", frame())
    for name, content in (("a.csv", b"n,y\n1,0\n"), ("empty.parquet", b""), ("short.parquet", b"PAR1" * 2)):
        (spec.path / name).write_bytes(content)
        assert "cannot be read as parquet" in reason(spec)
        (spec.path / name).unlink()
    frame()[:0].to_parquet(spec.path / "part-98.parquet", index=False)
    assert "has no rows" in reason(spec)
    # For a private job a file that one row leaves empty must change nothing.
    assert load_table(spec, label="y", categories={"color": ["red", "blue"]}, repair=True).n_rows == N_ROWS
    (spec.path / "part-98.parquet").unlink()
    with pytest.raises(ConfigurationError, match=r"many files can only be Parquet.*data_sets\.credit\.format"):
        load_table(DataSet("credit", spec.path, "csv"), label="y")


def test_links_and_folders_in_a_folder_are_refused(tmp_path: Path) -> None:
    frame().to_parquet(tmp_path / "elsewhere.parquet", index=False)
    spec = in_parts(tmp_path / "parts", frame())
    (spec.path / "part-50.parquet").symlink_to(tmp_path / "elsewhere.parquet")
    assert "holds a link" in reason(spec) and "holds a link" in reason(spec_of(spec.path / "part-*"))
    (spec.path / "part-50.parquet").unlink()
    (spec.path / "year=2026").mkdir()
    assert "holds a folder (such as year=2026)" in reason(spec)
    (tmp_path / "linked").symlink_to(spec.path)  # a path of the policy itself may be one, as that of a file
    (spec.path / "year=2026").rmdir()
    linked = load_table(spec_of(tmp_path / "linked"), label="y", features=["n"])
    assert linked.n_rows == N_ROWS


def test_a_link_that_is_put_there_after_the_look_at_the_folder_is_noticed(tmp_path: Path, monkeypatch) -> None:
    frame().to_parquet(tmp_path / "elsewhere.parquet", index=False)
    spec = in_parts(tmp_path / "parts", frame())
    seen, path = spec.files, spec.path / "part-01.parquet"
    monkeypatch.setattr(DataSet, "files", seen)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere.parquet")
    with refused_for("has changed, gone or come"):
        ParquetParts(spec)


def test_names_of_files_need_not_be_texts(tmp_path: Path) -> None:
    spec = in_parts(tmp_path / "parts", frame())
    for number, name in enumerate((b"part-\xff\n", "part-\N{LATIN SMALL LETTER U WITH DIAERESIS}".encode())):
        os.rename(spec.path / f"part-0{number}.parquet", os.fsencode(spec.path) + b"/" + name + b".parquet")
    assert load_table(spec, label="y", features=["n"]).n_rows == N_ROWS


def test_a_pattern_is_a_name_where_a_file_has_it(tmp_path: Path) -> None:
    pd.DataFrame({"x": [1.0], "y": [1]}).to_parquet(tmp_path / "rows[1].parquet")
    pd.DataFrame({"x": [2.0], "y": [1]}).to_parquet(tmp_path / "rows1.parquet")
    assert load_table(spec_of(tmp_path / "rows[1].parquet"), label="y").features[0, 0] == 1


def _append(folder: Path) -> None:
    frame()[:5].to_parquet(folder / "part-99.parquet", index=False)


def _replace(folder: Path) -> None:
    frame()[130:555].sample(frac=1, random_state=1).to_parquet(folder / "new", row_group_size=70, index=False)
    os.replace(folder / "new", folder / "part-02.parquet")


def _patch(folder: Path) -> None:
    """Change a byte and put the time back."""
    path, before = folder / "part-02.parquet", (folder / "part-02.parquet").stat()
    data = bytearray(path.read_bytes())
    data[-20] ^= 1  # in the footer, which says where columns are
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [_append, _replace, _patch, lambda folder: (folder / "part-02.parquet").unlink()])
def test_files_that_change_while_they_are_read_are_noticed(tmp_path: Path, change: object) -> None:
    spec = in_parts(tmp_path / "parts", frame())
    parts = ParquetParts(spec)
    batches = parts.batches(["n"], most_rows=100)
    next(batches)
    change(spec.path)  # type: ignore[operator]
    for look in (lambda: list(batches), parts.check_unchanged):
        with refused_for("has changed, gone or come"):
            look()


def test_a_policy_knows_the_files_of_a_folder(tmp_path: Path) -> None:
    folder = in_parts(tmp_path / "parts", frame()).path

    def policy(**paths: str) -> SitePolicy:
        document = {"data_sets": {name: {"path": path} for name, path in paths.items()}}
        return SitePolicy.from_dict(document, workspace=tmp_path, site="site-1")

    assert policy(rows="parts").data_set("rows").format == "parquet"
    assert policy(rows="parts/part-0*").data_set("rows").format == "parquet"
    for other in ("parts/part-02.parquet", "parts/*2.parquet", "parts/"):
        with pytest.raises(ConfigurationError, match="are one file"):
            policy(rows="parts", others=other)
    os.link(folder / "part-00.parquet", tmp_path / "same.parquet")
    with pytest.raises(ConfigurationError, match="are one file"):
        policy(rows="parts", others="same.parquet")
