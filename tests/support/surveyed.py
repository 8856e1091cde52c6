"""Tables to survey, and what is looked for in what is found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import Table, load_table
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.survey.columns import Finding
from nvflare_plugins.survey.survey import Survey

ROWS = 60
SECRET = "8675309"


def written(tmp_path: Path, data: bytes | str, name: str = "table.csv", **options: object) -> DataSet:
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return DataSet("table", path, "parquet" if name.endswith("parquet") else "csv", **options)  # type: ignore[arg-type]


def lines(*columns: list[str], header: str, separator: str = ",", end: str = "\n") -> str:
    return end.join([header, *(separator.join(row) for row in zip(*columns, strict=True)), ""])


def numbers(seed: int = 0, digits: int = 2) -> list[str]:
    return [f"{value:.{digits}f}" for value in np.random.default_rng(seed).normal(100, 20, ROWS)]


def labels() -> list[str]:
    return [str(row % 2) for row in range(ROWS)]


def kinds(found: Survey, problems_only: bool = True) -> list[str]:
    return [finding.kind for finding in found.findings if finding.is_problem or not problems_only]


def finding(found: Survey, kind: str, column: str | None = None) -> Finding:
    (one,) = [one for one in found.findings if one.kind == kind and column in (None, one.column)]
    return one


def as_drafted(spec: DataSet, found: Survey, label: str = "y") -> Table:
    """Load the data set as the draft says, through a policy as it would be written."""
    entry = {"path": str(spec.path), "format": spec.format, **json.loads(json.dumps(dict(found.draft.options)))}
    policy = SitePolicy.from_dict({"data_sets": {"table": entry}}, workspace=spec.path.parent, site="a")
    draft = found.draft
    return load_table(
        policy.data_set("table"),
        label=label,
        features=draft.features,
        categories=draft.categories,
        label_classes=draft.label_classes,
        may_lack_rows=True,
    )


def hospital() -> str:
    """One problem of every kind that a reader's option mends."""
    amounts = [f"{1 + row % 9}.{100 + row},{row:02d}" for row in range(ROWS)]
    columns = [
        [str(700_000 + 13 * row) for row in range(ROWS)],
        [number.replace(".", ",") for number in numbers()],
        amounts,
        [f"{1 + row % 28:02d}.03.{1950 + row}" for row in range(ROWS)],
        ["?" if row % 20 == 7 else number.replace(".", ",") for row, number in enumerate(numbers(1))],
        ["männlich" if row % 3 else "weiblich" for row in range(ROWS)],
        ["" if row == 4 else "krank" if row % 2 else "gesund" for row in range(ROWS)],
    ]
    return lines(*columns, header="Fall-Nr;Größe;Betrag;geb.;Wert [mg];Geschlecht;y", separator=";")
