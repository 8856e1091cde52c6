"""The page of ``veilboost drift``: how new rows differ from those that a model was trained on.

Privacy: shares of this site's rows, for its owner alone; sent nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nvflare_plugins.report.charts import Bar, horizontal_bars
from nvflare_plugins.report.pages import page

_MOST_BARS = 30


def build_page(document: Mapping[str, Any]) -> str:
    """Return the page as HTML.

    Args:
        document: what ``veilboost drift`` writes as JSON.
    """
    figures = {f"of_{what}": _bars(document[what], document["threshold"]) for what in ("scores", "features")}
    return page("drift.html", **document, **figures)


def _bars(found: Sequence[Mapping[str, Any]], threshold: float) -> str:
    return horizontal_bars(
        [
            Bar(one["name"], one["index"], f"{one['index']:.3f}", 5 if one["index"] >= threshold else 1)
            for one in found[:_MOST_BARS]
        ]
    )
