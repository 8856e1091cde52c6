"""``veilboost report``: one HTML file about a run that opens anywhere, without network.

Made from ``run.json``, the model and the evidence in the run's folder; it can be rebuilt at any time.
"""

from __future__ import annotations

import json
import logging
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xgboost as xgb

from he_processors.errors import ProtocolError
from nvflare_plugins.evidence.contents import Content, Protection
from nvflare_plugins.evidence.format import CLEAR_CODECS
from nvflare_plugins.evidence.plugin_claims import plugin_protection, release_of, threat_model
from nvflare_plugins.evidence.reader import Log, read_log
from nvflare_plugins.evidence.threat_model import ThreatModel, is_horizontal, notes_for, protection_text
from nvflare_plugins.failures import reason_of
from nvflare_plugins.files import write_atomically
from nvflare_plugins.formatting import human_bytes, markup
from nvflare_plugins.report.charts import Bar, Line, horizontal_bars, legend, line_chart, number, stacked_bars
from nvflare_plugins.report.data_facts import data_html
from nvflare_plugins.report.run_record import ReportSection, RoundRow, RunRecord
from nvflare_plugins.report.style import page
from nvflare_plugins.report.timeline import timeline
from nvflare_plugins.wire.catalogue import Kind
from nvflare_plugins.wire.profiles import plugin_of

FILE_NAME = "report.html"
logger = logging.getLogger(__name__)
MAX_FEATURES = 15
_STAGES = (
    ("xgboost", "XGBoost", 1),
    ("grow", "growth of trees", 1),
    ("protect", "protection", 2),
    ("encrypt", "encryption", 2),
    ("receive", "reading", 6),
    ("histogram", "sums of ciphertexts", 4),
    ("pack", "packing", 5),
    ("decrypt", "decryption", 5),
    ("network", "network and waiting", 3),
)
_VISIBLE_SHARE = 0.01
_CODEC_COLOUR = {"MASKED": 1, "BFV": 2, "CKKS": 4, "SEALED": 3, "PLAIN": 5, "PUBLIC": 6, "MASKED_32": 1, "PLAIN_32": 5}
_LOCAL_MEAN_METRICS = ("auc", "aucpr")


def write_report(run_folder: Path, output: Path | None = None) -> Path:
    """Build the report of a run. Returns the path of the HTML file, written whole or not at all.

    Args:
        run_folder: folder with ``run.json``, and the model and evidence that it names.
        output: where to write; default ``report.html`` in the run's folder.

    Raises:
        ConfigurationError: the folder holds no readable run record.
    """
    html = build_report(RunRecord.read(run_folder), run_folder)
    path = run_folder / FILE_NAME if output is None else output
    return write_atomically(path, html.encode())


def keep_report(run: RunRecord, folder: Path) -> None:
    """Write ``run.json`` and the report of a run that is done; if that fails, the run is done all the same."""
    try:
        run.write(folder)
        write_report(folder)
    except OSError as error:
        logger.error("the run is complete, but its report could not be written: %s", reason_of(error))


def build_report(run: RunRecord, folder: Path) -> str:
    """Return the report as HTML."""
    evidence = own_evidence(run, folder)
    log = evidence if isinstance(evidence, Log) else None
    sections = [
        _header(run, log),
        *_section("Learning curve", _learning_curves(run)),
        *_section("Time per round", _time(run)),
        *_section("Bytes by kind of message", _bytes(run)),
        *_section("What was protected, against whom", _protection(run, log)),
        *(html for section in run.sections for html in _section(section.title, _own_section(section))),
        *_section("Data of this site", data_html(run.data)),
        *_section("What this site's policy allowed", _policy(run)),
        *_section("Feature importance", _importance(run, folder)),
        *_section("Evidence", _evidence(evidence)),
        *_section("How it was run", _settings(run)),
    ]
    footer = (
        "Written by VeilBoost at this site. Times are wall-clock times of this site; bytes are payloads as they left "
        "and reached it."
    )
    return page(f"VeilBoost run {run.job_id}, {run.site}", "\n".join(sections), footer)


def _section(title: str, parts: Iterator[str]) -> Iterator[str]:
    content = "\n".join(parts)
    if content:
        yield f"<section><h2>{markup(title)}</h2>\n{content}\n</section>"


# -- head -------------------------------------------------------------------------------------------------------------


def _header(run: RunRecord, log: Log | None) -> str:
    model, plugin = _threat_model(run, log)
    summary = model.summary if model is not None else "This profile is unknown to this version."
    level = "bad" if run.profile == "plain" else "good"
    if plugin:
        summary, level = f"Plugin {plugin} claims: {summary}", "warn"
    tiles = "".join(
        f"<div class=tile><b>{markup(value)}</b><span>{markup(name)}</span></div>" for name, value in _key_figures(run)
    )
    status = "good" if run.status == "completed" else "bad"
    return (
        f"<header><p class=eyebrow>{markup(run.title)}</p><h1>{markup(run.job_id)}</h1>"
        f"<p><span class='chip {level}'>profile {markup(run.profile)}</span>"
        f"<span class='chip {status}'>{markup(run.status)}</span>"
        f"<span class='chip {'good' if run.signed else 'warn'}'>{'signed' if run.signed else 'UNSIGNED'}</span></p>"
        f"<p class=lead>{prose(summary)}</p><p class=muted>Seen from {markup(run.site)}; sites: "
        f"{markup(', '.join(run.sites))}. Attempt {markup(run.attempt)}{markup(when(run))}.</p>"
        f"<div class=tiles>{tiles}</div></header>"
    )


def when(run: RunRecord) -> str:
    """Return when it ran, to follow the attempt's name; "" where the record does not say."""
    if not run.started:
        return ""
    start, end = (text.replace("T", " ").removesuffix("+00:00") for text in (run.started, run.finished))
    return f", {start} to {end.removeprefix(start[:11])} UTC by this site's clock"


def _key_figures(run: RunRecord) -> Iterator[tuple[str, str]]:
    if run.rounds:
        yield from _round_figures(run)
    if run.traffic:
        yield "sent by this site in all", human_bytes(sum(row.bytes_out for row in run.traffic))


def _round_figures(run: RunRecord) -> Iterator[tuple[str, str]]:
    yield _noun(len(run.rounds), "round"), str(len(run.rounds))
    best = run.rounds[-1]
    if run.best_round is not None:
        best = next((row for row in run.rounds if row.round == run.best_round), best)
    metrics = [(name, value) for name, value in best.metrics.items() if _is_number(value)]
    if metrics:
        name, value = metrics[-1]
        which = "best round" if run.best_round is not None else "last round"
        yield f"{name}, {which}", f"{value:.5g}"
    typical = statistics.median(row.seconds for row in run.rounds[1:] or run.rounds)
    if typical > 0:  # parties that only answered have measured none
        yield "per round, median", f"{typical:.3g} s"


# -- learning and time ------------------------------------------------------------------------------------------------


def _is_number(value: float | None) -> bool:
    """Tell whether a metric has a value: what is none in the record is read as NaN."""
    return value is not None and math.isfinite(value)


def _learning_curves(run: RunRecord) -> Iterator[str]:
    by_metric: dict[str, list[Line]] = defaultdict(list)
    names = list(dict.fromkeys(name for row in run.rounds for name in row.metrics))
    for name in names:
        data_set, _, metric = name.partition("-")
        points = tuple((_shown(row), row.metrics[name]) for row in run.rounds if _is_number(row.metrics.get(name)))
        local = is_horizontal(run.profile) and metric in _LOCAL_MEAN_METRICS
        label = f"{data_set}, mean of the sites' local values" if local else data_set
        if points:
            by_metric[metric].append(Line(label, len(by_metric[metric]) % 6 + 1, points))
    for curve in run.comparison:
        points = tuple((curve.first_round + 1 + i, v) for i, v in enumerate(curve.values) if v is not None)
        lines = by_metric[curve.metric]
        if points:
            lines.append(Line(curve.name, len(lines) % 6 + 1, points, wide="central" in curve.name.lower()))
    for metric, lines in by_metric.items():
        yield legend([(line.name, line.colour) for line in lines])
        yield line_chart(lines, "round", metric)
        if metric in _LOCAL_MEAN_METRICS and any("local" in line.name for line in lines):
            yield (
                f"<p class=muted>XGBoost's distributed {markup(metric)} is the weighted mean of the sites' values, "
                "not the value on the pooled rows; the two differ. Bounds for that come with the job's field "
                "<code>pooled_metrics</code>.</p>"
            )


def _time(run: RunRecord) -> Iterator[str]:
    if not run.rounds:
        return
    stacks = []
    for key, name, colour in _STAGES:
        values = [row.stages.get(key) or 0.0 for row in run.rounds]
        if any(values):
            stacks.append((name, colour, values))
    rest = [max(row.seconds - sum(v or 0.0 for v in row.stages.values()), 0.0) for row in run.rounds]
    if sum(rest) > _VISIBLE_SHARE * sum(row.seconds for row in run.rounds):
        stacks.append(("other" if stacks else "whole round", 6, rest))
    if not stacks:
        return
    yield legend([(name, colour) for name, colour, _ in stacks])
    yield stacked_bars([_shown(row) for row in run.rounds], stacks, "round", "seconds")
    if len(run.rounds) > 1:
        medians = [f"{name} {statistics.median(values[1:]):.3g} s" for name, _, values in stacks]
        yield f"<p class=muted>Median of rounds after the first: {markup(', '.join(medians))}.</p>"
    yield from timeline(run.rounds)


def _shown(row: RoundRow) -> int:
    """Return a round's number as people and the log count: from 1."""
    return row.round + 1


# -- messages ---------------------------------------------------------------------------------------------------------


def _bytes(run: RunRecord) -> Iterator[str]:
    rows = sorted(run.traffic, key=lambda row: -(row.bytes_out + row.bytes_in))
    if not rows:
        return
    codecs = list(dict.fromkeys(row.codec for row in rows))
    yield legend([(codec.lower(), _CODEC_COLOUR.get(codec, 6)) for codec in codecs])
    yield horizontal_bars(
        [
            Bar(
                row.kind.lower().replace("_", " "),
                row.bytes_out + row.bytes_in,
                f"{human_bytes(row.bytes_out)} out, {human_bytes(row.bytes_in)} in",
                _CODEC_COLOUR.get(row.codec, 6),
                f"{_meaning(row.kind)}: {row.messages:,} x, {row.seconds:.3g} s",
            )
            for row in rows
        ]
    )


def _protection(run: RunRecord, log: Log | None) -> Iterator[str]:
    model, plugin = _threat_model(run, log)
    if run.traffic:
        yield "<div class=scroll><table class=messages>"
        yield "<tr><th>message<th>what it is<th class=n>messages<th>protection</tr>"
        for row in run.traffic:
            protection = protection_text(run.profile, row.kind, row.codec, row.private)
            mark = " class=bad" if row.private and row.codec in CLEAR_CODECS else ""
            yield (
                f"<tr><td>{markup(row.kind)}<td>{markup(_meaning(row.kind))}<td class=n>{row.messages:,}"
                f"<td{mark}>{markup(protection)}</tr>"
            )
        yield "</table></div>"
    yield from _contents(log)
    if model is not None:
        yield "<h3>Who could learn what about another site's rows, beyond the model</h3>"
        if plugin:
            yield f"<p>As plugin {markup(plugin)} states of itself. VeilBoost has not checked it.</p>"
        yield "<table class=threat>"
        yield from (f"<tr><th>{markup(who)}<td>{prose(what)}</tr>" for who, what in model.rows())
        yield "</table>"
        yield "<h3>What remains visible</h3><ul>"
        own = model.notes if plugin else ()
        yield from (f"<li>{prose(note)}" for note in (*own, *notes_for(run.profile)))
        yield "</ul>"


def _threat_model(run: RunRecord, log: Log | None) -> tuple[ThreatModel | None, str]:
    """Return what is visible under the run's profile, and the release of the plugin that claims so; "" without one."""
    if plugin_of(run.profile) is None:
        return threat_model(run.profile), ""
    facts = plugin_protection([log] if log is not None else [])
    return threat_model(run.profile, facts), release_of(facts or {})


def _contents(log: Log | None) -> Iterator[str]:
    """What this site's sealed messages held, from its own evidence."""
    if log is None or not log.parts:
        return
    totals: dict[tuple[str, str, str, str], list[int]] = {}
    for part in log.parts:
        entry = totals.setdefault((part.direction, part.peer, part.what, part.protection), [0, 0])
        entry[0] += 1
        entry[1] += part.size
    yield "<h3>Inside the sealed messages</h3><div class=scroll><table class=messages>"
    yield "<tr><th><th>party<th>what it is<th class=n>messages<th class=n>size<th>protection from its reader</tr>"
    for (direction, peer, what, protection), (n, size) in totals.items():
        content, known = Content.__members__.get(what), Protection.__members__.get(protection)
        yield (
            f"<tr><td>{'to' if direction == 'sent' else 'from'}<td>{markup(peer)}"
            f"<td>{markup(content.meaning if content else 'unknown')}<td class=n>{n:,}<td class=n>{human_bytes(size)}"
            f"<td>{markup(known.value if known else 'unknown')}</tr>"
        )
    yield "</table></div>"


def own_evidence(run: RunRecord, folder: Path) -> Log | ProtocolError | None:
    """Return the site's evidence, what is wrong with it, or None if there is none."""
    if run.evidence is None or not (folder / run.evidence).is_file():
        return None
    try:
        return read_log(folder / run.evidence)
    except ProtocolError as error:
        return error


def _meaning(kind: str) -> str:
    known = Kind.__members__.get(kind)
    return known.meaning if known is not None else "unknown kind"


def _own_section(section: ReportSection) -> Iterator[str]:
    """What this kind of job adds to the report."""
    yield from (f"<p>{prose(text)}</p>" for text in section.paragraphs)
    if section.curves:
        lines = [Line(c.name, i % 6 + 1, c.points) for i, c in enumerate(section.curves)]
        yield legend([(line.name, line.colour) for line in lines])
        yield line_chart(lines, section.x_label, section.y_label)
    if section.bars:
        yield horizontal_bars([Bar(label, value, text, 1, f"{label}: {text}") for label, value, text in section.bars])
    if section.rows:
        yield "<div class=scroll><table class=messages>"
        yield "<tr>" + "".join(f"<th>{markup(name)}" for name in section.columns) + "</tr>"
        yield from ("<tr>" + "".join(f"<td>{markup(cell)}" for cell in row) + "</tr>" for row in section.rows)
        yield "</table></div>"


# -- model ------------------------------------------------------------------------------------------------------------


def _importance(run: RunRecord, folder: Path) -> Iterator[str]:
    if run.model is None or not (folder / run.model).is_file():
        return
    try:
        gain, weight = feature_importance(folder / run.model)
    except xgb.core.XGBoostError as error:
        text = str(error).splitlines()[0].replace(f"{folder / run.model}", run.model)  # a page may be passed on
        yield f"<p class=muted>XGBoost gives no importance for this model: {markup(text)}</p>"
        return
    if not gain:
        yield "<p class=muted>The model splits on no feature.</p>"
        return
    has_gains = any(gain.values())  # trees that came from single sites have none
    shares = {name: (gain[name] if has_gains else 1.0) * weight[name] for name in gain}
    total = sum(shares.values())
    ranked = sorted(gain, key=lambda name: -shares[name])
    bars = []
    for name in ranked[:MAX_FEATURES]:
        splits = f"{weight[name]:,.0f} {_noun(weight[name], 'split')}"
        tip = f"{name}: mean gain {number(gain[name])} over {splits}" if has_gains else f"{name}: {splits}"
        bars.append(Bar(name, shares[name] / total, f"{100 * shares[name] / total:.1f} %  ({splits})", 1, tip))
    yield horizontal_bars(bars)
    rest = len(ranked) - MAX_FEATURES
    more = f" {rest} further features are not shown." if rest > 0 else ""
    of_gains = "Share of the total gain, and number of splits (weight). Point at a bar for the mean gain."
    of_splits = "Share of the splits, and their number (weight): the model carries no gains."
    yield f"<p class=muted>{of_gains if has_gains else of_splits}{more}</p>"


def feature_importance(model: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return (mean gain, number of splits) per feature of a model file. Raises: XGBoostError."""
    booster = xgb.Booster()
    booster.load_model(model)
    return _scores(booster, "gain"), _scores(booster, "weight")


def _scores(booster: xgb.Booster, kind: str) -> dict[str, float]:
    scores = booster.get_score(importance_type=kind)
    return {name: value for name, value in scores.items() if isinstance(value, float)}  # lists are of linear models


# -- evidence and settings --------------------------------------------------------------------------------------------


def _evidence(evidence: Log | ProtocolError | None) -> Iterator[str]:
    yield from _evidence_status(evidence)
    yield (
        "<p class=muted>This site's own log was read here. That all sites and the server recorded the same is for "
        "<code>veilboost verify</code> to say, on the exported logs. Evidence shows agreement of records; it does not "
        "show honest inputs, good randomness, or the absence of side channels.</p>"
    )


def _evidence_status(log: Log | ProtocolError | None) -> Iterator[str]:
    if log is None:
        yield "<p><span class='chip bad'>missing</span> The run's folder holds no evidence.</p>"
        return
    if isinstance(log, ProtocolError):
        yield f"<p><span class='chip bad'>broken</span> {markup(str(log))}</p>"
        return
    state = ("good", "intact") if log.completed and not log.unfinished else ("warn", "not completed")
    signed = "signed with the site's certificate" if log.session and log.session["signed"] else "UNSIGNED"
    yield (
        f"<p><span class='chip {state[0]}'>{state[1]}</span> {len(log.digests):,} records, "
        f"{len(log.messages):,} messages, {len(log.local):,} answered without leaving the site; {signed}.</p>"
        f"<p class=hash>last hash {log.digests[-1].hex()}</p>"
    )
    if log.session:
        yield f"<p class=hash>this site's policy at the time {markup(log.session['policy_hash'])}</p>"


def _policy(run: RunRecord) -> Iterator[str]:
    if not run.policy_hash:
        return
    used = ", ".join(f"<code>{markup(name)}</code>" for name in run.consents)
    yield f"<p>Consents that this job needed here and the policy gives: {used or 'none'}.</p>"
    for one in run.spending:
        spent = "its ledger could not be read" if one.spent is None else f"epsilon {one.spent:.4g} is spent"
        yield (
            f"<p>Data set {markup(one.data_set)} has a budget of epsilon {one.epsilon:g} at delta {one.delta:g}; over "
            f"all jobs, {spent}.</p>"
        )
    yield f"<p class=hash>hash of the policy {markup(run.policy_hash)}</p>"


def _settings(run: RunRecord) -> Iterator[str]:
    if run.notes:
        yield "<ul>" + "".join(f"<li>{prose(note)}" for note in run.notes) + "</ul>"
    yield "<div class=columns>"
    for title, values in (
        ("XGBoost parameters", run.params),
        ("Job", run.settings),
        ("Cut points", run.cuts),
        ("Versions", run.versions),
    ):
        values = {name: value for name, value in values.items() if value not in (None, "", [], {})}
        if values:
            rows = "".join(f"<tr><th>{markup(str(k))}<td>{markup(_text(v))}</tr>" for k, v in values.items())
            yield f"<div><h3>{title}</h3><table class=pairs>{rows}</table></div>"
    yield "</div>"
    if run.registry:
        yield f"<h3>Registry against differencing</h3><p>{prose(run.registry[0].upper() + run.registry[1:])}</p>"


def prose(text: str) -> str:
    """Return a text for the page, with what stands between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", markup(text))


def _noun(n: float, one: str) -> str:
    return one if n == 1 else f"{one}s"


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else text[:199] + "\u2026"
