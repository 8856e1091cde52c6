"""A run in a notebook's cell: name, scores, curve and who could learn what, as HTML in light colours.

It brings its own style, loads nothing and runs no script, so that it looks alike wherever a notebook is shown.
"""

from __future__ import annotations

from nvflare_plugins.pages.charts import in_light_colours
from nvflare_plugins.pages.render import page
from nvflare_plugins.pages.report import key_figures, learning_curves, threat_of
from nvflare_plugins.pages.run_record import RunRecord


def run_part(run: RunRecord, name: str = "") -> str:
    """Return what a notebook shows of a run (``_repr_html_``). Args: name: its heading; the job's own by default."""
    curve, best = next((chart for _, chart, _ in learning_curves(run)), ""), run.best()
    model, plugin = threat_of(run, None)
    at_best = next((row.metrics for row in run.rounds if best is not None and row.round == best.round), {})
    facts = {"key_figures": key_figures(run), "at_best": at_best, "curve": curve, "model": model, "plugin": plugin}
    return in_light_colours(page("part.html", name=name or run.called, run=run, **facts))
