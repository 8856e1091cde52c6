"""``attacks.html`` of a dossier: what attacks on the job's model found, beside what they find without protection.

Privacy: figures over all rows; see SECURITY.md for what they tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nvflare_plugins.dossier.attacks import AttackReport
from nvflare_plugins.dossier.membership import Attacked
from nvflare_plugins.dossier.statistics import Estimate
from nvflare_plugins.formatting import markup
from nvflare_plugins.report.style import PRINTED, page

_NAMES = {
    "loss": ("By loss", "rows that the model fits well (Yeom et al. 2018)"),
    "reference": ("By reference models", "rows that it fits better than 16 models without them (Carlini et al. 2022)"),
    "none": ("No model", "models that had neither group"),
}


def build_page(report: AttackReport, job_id: str, site: str) -> str:
    """Return the page as HTML."""
    parts = [
        "<header><p class=eyebrow>Attacks on the model, run by this site on its own rows</p>"
        f"<h1>{markup(job_id)}, {markup(site)}</h1>{_head(report)}</header>"
    ]
    if not report.reason:
        parts += [*_membership(report), *_values(report), *_notes(report)]
    footer = (
        "Written by VeilBoost at this site. The page holds figures over all rows that were used, to three decimals; no "
        "row, score or id. They were computed on the rows themselves: what privacy was promised for the model does not "
        "cover them."
    )
    return page(f"Attacks: {job_id}, {site}", "\n".join(parts), footer, PRINTED)


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


def _head(report: AttackReport) -> str:
    if report.reason:
        return f"<p><span class='chip warn'>not run</span>{markup(report.reason)}.</p>"
    return (
        f"<p class=lead>{markup(summary(report))}</p><p class=muted>{markup(report.members)}, on which the model was "
        f"trained, beside {markup(report.others)}, on which it was not. Intervals are of 95 %.</p>"
    )


def _membership(report: AttackReport) -> Iterator[str]:
    yield "<section><h2>Was a row in the training? (membership inference)</h2>"
    yield "<table class=messages><tr><th>model<th>attack<th class=n>AUC<th class=n>found at 1 % false alarms</tr>"
    yield from _rows("this model", report.model)
    if report.bound is not None:
        yield (
            f"<tr><th>bound<td>any attack, by the accounting ({markup(report.bound.source)})"
            f"<td class=n>{report.bound.area:.3f}<td class=n>{report.bound.hits:.3f}</tr>"
        )
    yield from _rows("control: unprotected, of this site's rows alone", report.unprotected)
    if report.none is not None:
        yield from _rows("control: no model that had a row", [report.none])
    yield "</table><p class=fine>AUC: how often a row of the training gets a higher score than another one; 0.5 is a "
    yield "toss of a coin. The last column: the share of the rows of the training that are named where one in a "
    yield "hundred others is named wrongly; 0.010 is chance. The attacker knows the row with its label, has the model, "
    yield "and has rows of the same kind. The first control shows that the attacks work; the second should be 0.5."
    if report.bound is not None:
        yield (
            f" The bound is for one person, against whoever knows all other rows: a guess is right in "
            f"{100 * report.bound.right:.3g} % of cases at most. It holds on average; the interval of an attack on one "
            "model may cross it."
        )
    else:
        yield " No bound is proven for this job: another attack may find more."
    yield "</p></section>"


def _rows(model: str, found: Sequence[Attacked]) -> Iterator[str]:
    for number, one in enumerate(found):
        name, words = _NAMES[one.name]
        head = markup(model) if number == 0 else ""
        yield (
            f"<tr><th>{head}<td>{name}<br><span class=muted>{markup(words)}</span>"
            f"<td class=n>{_cell(one.area)}<td class=n>{_cell(one.hits)}</tr>"
        )


def _values(report: AttackReport) -> Iterator[str]:
    yield "<section><h2>What is a hidden value? (reconstruction)</h2>"
    if not report.values:
        yield "<p>Not tried: the model splits no column that has more than one value here.</p></section>"
        return
    yield "<table class=messages><tr><th>column<th class=n>told apart<th class=n>rows of the training"
    yield "<th class=n>other rows<th class=n>commonest value<th class=n>gain</tr>"
    for number, one in enumerate(report.values):
        bound = f"<br><span class=muted>bound {report.value_bounds[number]:.3f}</span>" if report.value_bounds else ""
        yield (
            f"<tr><th>{markup(one.feature)}<td class=n>{one.n_values}<td class=n>{_cell(one.members)}{bound}"
            f"<td class=n>{_cell(one.others)}<td class=n>{one.common:.3f}<td class=n>{_cell(one.gain)}</tr>"
        )
    yield "</table><p class=fine>The attacker knows all of a row but one value, and the model; he guesses the "
    yield "category, or the bin among those told apart (Fredrikson et al. 2014). Shares guessed right, for the columns "
    yield "that the model splits most often. What is guessed as well of other rows follows from what the model says of "
    yield "anybody; the gain is what it gives away of the rows of its training. Where its interval holds zero, these "
    yield "rows show none.</p></section>"


def _notes(report: AttackReport) -> Iterator[str]:
    yield "<section><h2>What limits these figures</h2><ul>"
    yield from (f"<li>{markup(note)}" for note in report.notes)
    yield "<li>They are about this site's rows; rows of others may be told apart more easily, or less."
    yield "<li>An average says little of single rows: rare ones are told apart more easily than others."
    yield "<li>A better attack may exist. That none was found proves nothing; only an accounted epsilon bounds all."
    yield "</ul></section>"


def _cell(one: Estimate) -> str:
    return f"{one.value:.3f}<br><span class=muted>{one.low:.3f} to {one.high:.3f}</span>"


def _of(one: Estimate) -> str:
    return f"{one.value:.3f} ({one.low:.3f} to {one.high:.3f})"
