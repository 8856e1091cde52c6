"""The page of ``veilboost drift``: how new rows differ from those that a model was trained on.

Privacy: shares of this site's rows, for its owner alone; sent nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nvflare_plugins.formatting import counted, markup
from nvflare_plugins.report.charts import Bar, horizontal_bars
from nvflare_plugins.report.style import page

_MOST_BARS = 30
_MOST_TABLES = 6


def build_page(document: Mapping[str, Any]) -> str:
    """Return the page as HTML.

    Args:
        document: what ``veilboost drift`` writes as JSON.
    """
    features, scores = document["features"], document["scores"]
    drifted = [one["name"] for one in (*scores, *features) if one["index"] >= document["threshold"]]
    chip = ("bad", f"drift: {', '.join(drifted[:5])}") if drifted else ("good", "no drift")
    body = "\n".join(
        (
            "<header><p class=eyebrow>New rows beside the training rows</p>"
            f"<h1>{markup(document['model'])}, {markup(document['site'])}</h1>"
            f"<p><span class='chip warn'>for this site only</span><span class='chip {chip[0]}'>{markup(chip[1])}</span>"
            f"</p><p class=lead>{counted(document['new_rows'], 'new row')} beside "
            f"{counted(document['training_rows'], 'training row')} of job {markup(document['job'])}.</p></header>",
            *_section("Scores of the model", scores, document["threshold"]),
            *_section("Columns", features, document["threshold"]),
            "<section><h2>How to read it</h2><ul>",
            *(f"<li>{markup(note)}" for note in _notes(document)),
            "</ul></section>",
        )
    )
    footer = "Written by VeilBoost at this site, from its own rows. It was sent nowhere and is for its owner alone."
    return page(f"Drift: {document['model']}, {document['site']}", body, footer)


def _section(title: str, found: Sequence[Mapping[str, Any]], threshold: float) -> Iterator[str]:
    yield f"<section><h2>{title}: stability index</h2>"
    bars = [
        Bar(one["name"], one["index"], f"{one['index']:.3f}", 5 if one["index"] >= threshold else 1)
        for one in found[:_MOST_BARS]
    ]
    yield horizontal_bars(bars)
    yield "<div class=scroll><table class=messages><tr><th>name<th class=n>index<th class=n>by chance"
    yield "<th class=n>missing before<th class=n>missing now<th>categories that the model lacks</tr>"
    for one in found:
        new = ", ".join(f"{text}: {rows}" for text, rows in one["new_categories"].items())
        unknown = f"{counted(one['unknown'], 'row')}{f' ({new})' if new else ''}" if one["unknown"] else ""
        yield (
            f"<tr><td>{markup(one['name'])}<td class=n>{one['index']:.3f}<td class=n>{one['by_chance']:.3f}"
            f"<td class=n>{one['missing_before']:.1%}<td class=n>{one['missing_now']:.1%}<td>{markup(unknown)}</tr>"
        )
    yield "</table></div>"
    for one in found[:_MOST_TABLES]:
        if one["index"] >= threshold:
            yield f"<h3>{markup(one['name'])}</h3><table class=pairs><tr><th>bin<th class=n>before<th class=n>now</tr>"
            for label, before, now in zip(one["labels"], one["before"], one["now"], strict=True):
                yield f"<tr><th>{markup(label)}<td class=n>{before:.1%}<td class=n>{now:.1%}</tr>"
            yield "</table>"
    yield "</section>"


def _notes(document: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "The stability index sums (now - before) ln(now / before) over a column's bins, which are those of the model. "
        f"Below 0.1 little has changed; {document['threshold']:g} was the threshold here."
    )
    yield "'By chance' is what two batches of these sizes from one population give on average: few rows say little."
    yield "It compares columns one by one: that labels have come to mean something else, it does not see."
    yield from document["notes"]
