"""The page of the five papers: table by table ours beside theirs, from what was kept of the runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.bench.papers.table import Cell, Cells, Paper, PaperTable, from_json
from tests.bench.rivals_figure import draw
from tests.generated_tables import table as markdown

_HEAD = """# The five papers, table by table

Written by `python -m tests.bench.bench_papers` (`make bench-papers DATA=folder`). A cell shows ours (standard deviation
over runs), in brackets the paper's number, in braces that of the authors' own code where it was run. **Bold**: ours is
better, *italic*: worse, by more than .015 and three standard errors. Plain: no difference, or nothing to compare with.
Seconds depend on machine and load.
"""


def page(papers: Sequence[Paper], kept: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page as Markdown. Args: kept: by the table's key, ``maddock/3``."""
    parts = [_HEAD, markdown(("paper", "table", "state"), _summary(papers, kept))]
    for paper in papers:
        parts.append(f"## {paper.title}\n")
        for name, table in paper.tables.items():
            found = kept.get(f"{paper.key}/{name}", {})
            parts += _section(table, found)
            if table.axis is not None and "cells" in found:
                parts.append(f"![{table.name}](figures/{_picture(paper.key, name)})\n")
    return "\n".join(parts)


def pictures(papers: Sequence[Paper], kept: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield name and SVG of each figure that was measured."""
    for paper in papers:
        for name, table in paper.tables.items():
            found = kept.get(f"{paper.key}/{name}", {})
            if table.axis is not None and "cells" in found:
                yield _picture(paper.key, name), _drawn(table.axis, from_json(found["cells"]))


def _picture(paper: str, name: str) -> str:
    return f"papers_{paper}_{name}.svg"


def _drawn(axis: str, cells: Cells) -> str:
    curves: dict[str, dict[str, dict[str, Any]]] = {}
    for place, of_row in cells.items():
        for column, cell in of_row.items():
            name, _, method = column.partition(", ")
            curves.setdefault(name, {}).setdefault(method, {})[place] = {"auc": {"mean": cell.ours}}
    return draw(curves, [float(place) for place in cells], None, axis)


def _summary(papers: Sequence[Paper], kept: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    for paper in papers:
        for name, table in paper.tables.items():
            yield (
                paper.title.partition(" (")[0].partition(",")[0],
                table.name,
                state(table, kept.get(f"{paper.key}/{name}", {})),
            )


def state(table: PaperTable, found: Mapping[str, Any]) -> str:
    """Say how a table stands, in a line."""
    if "cells" not in found:
        return "not run" + (f": {'; '.join(found['missing'].values())}" if found.get("missing") else "")
    cells = [cell for row in from_json(found["cells"]).values() for cell in row.values() if cell.distance() is not None]
    if not cells:
        return "measured; the paper's numbers are not at hand"
    near = sum(cell.is_near() for cell in cells)
    if table.higher is None:
        return f"measured beside {len(cells)} of the paper's numbers"
    better = sum(is_better(table, cell) for cell in cells)
    return f"{near} of {len(cells)} cells equal, {better} better, {len(cells) - near - better} worse"


def is_better(table: PaperTable, cell: Cell) -> bool:
    """Return whether ours is clearly better."""
    distance = cell.distance()
    return distance is not None and table.higher is not None and not cell.is_near() and (distance > 0) == table.higher


def _section(table: PaperTable, found: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {table.name}\n"
    yield f"{table.about} State: {state(table, found)}.\n"
    if "cells" in found:
        yield _cells(table, from_json(found["cells"]))
        splits, repeats = found["runs"]
        yield (
            f"{splits} splits, {repeats} runs each where there are splits; {found['cpu_s']} processor seconds, "
            f"{found['wall_s']} s; {found['date']}, commit {found['commit']}; {found['machine']}.\n"
        )
        for name, reason in found["missing"].items():
            yield f"* {name} is missing: {reason}."
    yield from (f"* {remark}" for remark in table.remarks)
    if table.remarks or found.get("missing"):
        yield ""


def _cells(table: PaperTable, cells: Cells) -> str:
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    rows = []
    for name, of_row in cells.items():
        rows.append([name, *(_shown(table, of_row[column]) if column in of_row else "" for column in columns)])
    return markdown(("", *columns), rows)


def _shown(table: PaperTable, cell: Cell) -> str:
    def digits(value: float) -> str:
        text = f"{value:.{table.digits}f}"
        return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text

    if cell.ours is None:
        return ""
    text = digits(cell.ours) + (f" ({digits(cell.sd)})" if cell.n > 1 else "")
    if table.higher is not None and cell.distance() is not None and not cell.is_near():
        text = f"**{text}**" if is_better(table, cell) else f"*{text}*"
    text += "" if cell.paper is None else f" [{digits(cell.paper)}]"
    return text + ("" if cell.code is None else f" {{{digits(cell.code)}}}")
