"""``attacks.html`` of a dossier: what attacks on the job's model found, beside what they find without protection.

Privacy: figures over all rows; see SECURITY.md for what they tell.
"""

from __future__ import annotations

from nvflare_plugins.dossier.attacks import AttackReport
from nvflare_plugins.dossier.statistics import Estimate
from nvflare_plugins.report.pages import page

_NAMES = {
    "loss": ("By loss", "rows that the model fits well (Yeom et al. 2018)"),
    "reference": ("By reference models", "rows that it fits better than 16 models without them (Carlini et al. 2022)"),
    "none": ("No model", "models that had neither group"),
}


def build_page(report: AttackReport, job_id: str, site: str) -> str:
    """Return the page as HTML."""
    return page("attacks.html", report=report, job_id=job_id, site=site, summary=summary(report), names=_NAMES)


def summary(report: AttackReport) -> str:
    """Return the outcome in a sentence or two, as text."""
    if report.reason:
        return f"not run: {report.reason}"
    best = max(report.model, key=lambda one: one.area.value)
    control = max(report.unprotected, key=lambda one: one.area.value)
    found = (
        f"Telling rows of the training from others works with an AUC of {_of(best.area)} on this model (0.5 is "
        f"guessing), and with {_of(control.area)} on one that was trained on this site's rows alone and unprotected."
    )
    bound = report.bound
    return found + (f" The accounted privacy allows {bound.area:.3f} at most." if bound is not None else "")


def _of(one: Estimate) -> str:
    return f"{one.value:.3f} ({one.low:.3f} to {one.high:.3f})"
