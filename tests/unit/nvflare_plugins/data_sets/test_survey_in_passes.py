"""A survey of what is read in passes finds what it finds of held rows, column by column."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.parquet_parts import ParquetParts
from nvflare_plugins.survey.columns import Use
from nvflare_plugins.survey.survey import Survey, survey
from tests.support.surveyed import kinds


def of_every_kind(n_rows: int) -> pa.Table:
    """Return columns with something to find in nearly each."""
    rng, rows = np.random.default_rng(3), np.arange(n_rows)
    towns = np.array(["Köln", "Gänserndorf", "Zürich ", "unbekannt", ""])[rng.integers(0, 5, n_rows)]
    gaps = [None if row % 7 == 0 else float(row) / 3 for row in rows]
    moments = pa.array((rows * 86_400_000_000).tolist(), pa.timestamp("us"))
    return pa.table(
        {
            "Größe": pa.array(gaps, pa.float64()),
            "town": pa.array(towns.tolist(), pa.string()),
            "coded": pa.array(towns.tolist(), pa.string()).dictionary_encode(),
            "admitted": pa.array([f"{row % 28 + 1:02}.03.2026" for row in rows], pa.string()),
            "moment": moments,
            "comma": pa.array([f"{row},5" for row in rows], pa.string()),
            "thousands": pa.array([f"{row + 1000:,}".replace(",", ".") + ",25" for row in rows], pa.string()),
            "mostly": pa.array(["n/a" if row % 9 == 0 else "12" for row in rows], pa.string()),
            "broken": pa.array(["oops" if row == 20 else str(row) for row in rows], pa.string()),
            "large": pa.array([1e39 if row == 40 else 1.0 * row for row in rows], pa.float64()),
            "nothing": pa.nulls(n_rows),
            "emptied": pa.array([None] * n_rows, pa.string()),
            "constant": pa.array([2] * n_rows, pa.int32()),
            "patient_id": pa.array((rows * 17).tolist(), pa.int64()),
            "flag": pa.array([row % 2 == 0 for row in rows], pa.bool_()),
            "list": pa.array([[1.0]] * n_rows, pa.list_(pa.float64())),
            "key": pa.array([None if row == 5 else f"k{row // 2}" for row in rows], pa.string()),
            "y": pa.array(["" if row == 30 else "ja" if row % 2 else "nein" for row in rows], pa.string()),
            "w": pa.array([-1.0 if row == 11 else 1.0 for row in rows], pa.float64()),
        }
    )


USES = {
    "nothing said": Use(),
    "label and weight": Use(label="y", weight="w"),
    "a job's": Use(
        label="y",
        label_classes=("ja",),
        features=("town", "Größe", "gone", "admitted", "comma"),
        categories={"town": ("Köln", "Zürich")},
        is_settled=True,
    ),
}


def both_surveys(spec: DataSet, use: Use, monkeypatch: pytest.MonkeyPatch) -> tuple[Survey, Survey, int]:
    """Return what is found of held rows and in passes, and how many columns a pass has read at most."""
    whole, widths, read = survey(dataclasses.replace(spec, memory="whole"), use), [0], ParquetParts.read

    def counted(self: ParquetParts, columns: list[str], *rows: int) -> pa.Table:
        widths.append(len(columns))
        return read(self, columns, *rows)

    with monkeypatch.context() as context:
        context.setattr(ParquetParts, "read", counted)
        context.setattr("nvflare_plugins.survey.raw_file.arrow_parquet", None)  # reads all columns
        return whole, survey(dataclasses.replace(spec, memory="passes"), use), max(widths)


@pytest.mark.parametrize(
    ("n_rows", "use"),
    [*((400, one) for one in USES), *((0, one) for one in USES), (5200, "label and weight")],
)
def test_columns_one_by_one_are_found_to_be_what_they_are_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_rows: int, use: str
) -> None:
    table = of_every_kind(n_rows)
    pq.write_table(table, tmp_path / "one.parquet")
    options = {"id": "key", "rename": {"w": "weight", "gone": "away"}, "missing": ("",)}
    one = DataSet("t", tmp_path / "one.parquet", "parquet", **options)  # type: ignore[arg-type]
    whole, passes, n_columns = both_surveys(one, USES[use], monkeypatch)
    assert whole == passes and (n_columns == 1 or not n_rows) and whole.n_rows == n_rows
    assert len(whole.findings) > (8 if n_rows else 1)
    if n_rows:
        (tmp_path / "parts").mkdir()
        for number, first in enumerate(range(0, n_rows, n_rows // 4)):
            part = table.slice(first, n_rows // 4)
            pq.write_table(part, tmp_path / "parts" / f"{number}.parquet", row_group_size=37)
        parts = dataclasses.replace(one, path=tmp_path / "parts", rename={"w": "weight"})
        of_parts, in_passes, n_columns = both_surveys(parts, USES[use], monkeypatch)
        assert of_parts == in_passes and n_columns == 1
        assert of_parts.findings == survey(dataclasses.replace(one, rename={"w": "weight"}), USES[use]).findings


def test_wide_tables_names_that_repeat_and_damage_are_found_in_passes_too(tmp_path: Path, monkeypatch) -> None:
    wide = pa.table({f"f{place}": np.arange(60.0) % (place + 2) for place in range(200)})
    pq.write_table(wide, tmp_path / "wide.parquet")
    whole, passes, n_columns = both_surveys(DataSet("t", tmp_path / "wide.parquet", "parquet"), Use(), monkeypatch)
    assert whole == passes and n_columns == 3
    pq.write_table(pa.Table.from_arrays([pa.array([1.0]), pa.array([2.0])], ["a", "a"]), tmp_path / "twice.parquet")
    twice = DataSet("t", tmp_path / "twice.parquet", "parquet", memory="passes")
    assert survey(twice, Use()) == survey(dataclasses.replace(twice, memory=None), Use())
    content = bytearray((tmp_path / "wide.parquet").read_bytes())
    content[4:2000] = b"\xff" * 1996
    (tmp_path / "torn.parquet").write_bytes(content)
    torn = DataSet("t", tmp_path / "torn.parquet", "parquet", memory="passes")
    assert kinds(survey(torn, Use())) == kinds(survey(dataclasses.replace(torn, memory=None), Use())) == ["unreadable"]


@pytest.mark.parametrize("memory", ["whole", "passes"])
def test_more_rows_than_allowed_in_many_files_are_found(tmp_path: Path, memory: str) -> None:
    (tmp_path / "parts").mkdir()
    for number in range(2):
        pq.write_table(pa.table({"a": [1.0, 2.0]}), tmp_path / "parts" / f"{number}.parquet")
    found = survey(DataSet("t", tmp_path / "parts", "parquet", max_rows=3, memory=memory), Use())
    assert [(one.kind, one.count) for one in found.findings if one.is_problem] == [("max_rows", 4)]
