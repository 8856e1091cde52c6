"""Pages about a run that open anywhere, without network: ``veilboost report``, and its ``--summary``.

Made from ``run.json``, the model and the evidence in the run's folder; they can be rebuilt at any time. The summary is
one page for a data-protection officer. It repeats the site's own words (policy key ``data_protection``), what the
software knows, and what ``veilboost verify`` said if it was asked. It judges nothing. A notebook's cell shows a part in
light colours.

Privacy: the summary holds counts of this site's rows, like ``run.json``: a page for the site's own people.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from he_processors.errors import ProtocolError
from nvflare_plugins.base.declared import description_of
from nvflare_plugins.base.errors import reason_of
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.base.formatting import human_bytes, number
from nvflare_plugins.evidence.audit import plugin_protection, release_of, threat_model
from nvflare_plugins.evidence.format import CLEAR_CODECS, Content, Protection
from nvflare_plugins.evidence.reader import Log, read_log
from nvflare_plugins.evidence.threat_model import is_horizontal, notes_for, protection_text
from nvflare_plugins.pages import charts
from nvflare_plugins.pages.model_charts import ClassFigures, class_figures, tree_chart
from nvflare_plugins.pages.profile_page import FILE_NAME as LOCAL_PAGE
from nvflare_plugins.pages.run_record import (
    REPORT,
    BestRound,
    ReportSection,
    RoundRow,
    RunRecord,
    TrafficRow,
    is_number,
)
from nvflare_plugins.site.policy_values import Consents, is_private
from nvflare_plugins.site.profiles import ThreatModel
from nvflare_plugins.wire.envelope import CURVE_METRICS, Kind
from nvflare_plugins.wire.profiles import plugin_of
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.model_json import categories_of, leaf_size, trees_model

logger = logging.getLogger(__name__)
RELEASE_FACTS = "release_facts.json"
"""What `veilboost release` has measured of the run's model, in the run's folder."""
MAX_FEATURES = 15
_VISIBLE_SHARE = 0.01
_CODEC_COLOUR = {"MASKED": 1, "BFV": 2, "CKKS": 4, "SEALED": 3, "PLAIN": 5, "PUBLIC": 6, "MASKED_32": 1, "PLAIN_32": 5}


def write_report(run_folder: Path, output: Path | None = None) -> Path:
    """Build the report of a run. Returns the path of the HTML file, written whole or not at all.

    Args:
        run_folder: folder with ``run.json``, and the model and evidence that it names.
        output: where to write; default ``report.html`` in the run's folder.

    Raises:
        ConfigurationError: the folder holds no readable run record.
    """
    html = build_report(RunRecord.read(run_folder), run_folder)
    path = run_folder / REPORT if output is None else output
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
    model, plugin = threat_of(run, log)
    own_notes = model.notes if model is not None and plugin else ()
    times, medians = _times(run)
    importance, of_importance = _importance(run, folder)
    return charts.page(
        "report.html",
        run=run,
        log=log,
        broken=str(evidence) if isinstance(evidence, ProtocolError) else "",
        model=model,
        plugin=plugin,
        notes=(*own_notes, *notes_for(run.profile)),
        key_figures=list(key_figures(run)),
        curves=list(learning_curves(run)),
        times=times,
        medians=medians,
        strips=charts.timeline(run.rounds) if times else "",
        bytes=_bytes(run),
        traffic=[
            (
                row,
                _meaning(row.kind),
                protection_text(run.profile, row.kind, row.codec, private=row.private),
                is_readable(row),
            )
            for row in run.traffic
        ],
        sealed=[] if log is None else list(_sealed(log)),
        sections=[(section, _own_figures(section)) for section in run.sections],
        scored=[(section, of_scores(section, run)) for section in run.sections if section.scores],
        is_compared=is_horizontal(run.profile) and run.model is not None,
        tree=_tree(run, folder),
        local_page=LOCAL_PAGE if (folder / LOCAL_PAGE).is_file() else "",
        importance=importance,
        of_importance=of_importance,
        release=_release(folder),
        settings=list(_settings(run)),
    )


# -- head -------------------------------------------------------------------------------------------------------------


def key_figures(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield (what it is, number): first the score, with its best round."""
    best = run.best()
    if best is not None:
        yield f"{best.metric}, best in round {best.round + 1}", f"{best.value:.5g}"
        last = run.rounds[-1].metrics.get(best.metric)
        if last is not None and is_number(last) and best.round != run.rounds[-1].round:
            yield f"{best.metric}, last round", f"{last:.5g}"
    if run.rounds:
        yield "round" if len(run.rounds) == 1 else "rounds", str(len(run.rounds))
        typical = statistics.median(row.seconds for row in run.rounds[1:] or run.rounds)
        if typical > 0:  # parties that only answered have measured none
            yield "per round, median", f"{typical:.3g} s"
    if run.traffic:
        yield "sent by this site in all", human_bytes(sum(row.bytes_out for row in run.traffic))


# -- learning and time ------------------------------------------------------------------------------------------------


def learning_curves(run: RunRecord) -> Iterator[tuple[str, str, bool]]:
    """Yield (metric, its curves with the best round marked, whether one of them is the mean of the sites' values)."""
    by_metric: dict[str, list[charts.Line]] = defaultdict(list)
    marks: dict[str, BestRound] = {}
    for name in dict.fromkeys(name for row in run.rounds for name in row.metrics):
        data_set, _, metric = name.partition("-")
        points = tuple((_shown(row), row.metrics[name]) for row in run.rounds if is_number(row.metrics.get(name)))
        local = is_horizontal(run.profile) and metric in CURVE_METRICS
        best = run.best(name)
        if points and best is not None:
            label = f"{data_set}, mean of the sites' local values" if local else data_set
            by_metric[metric].append(charts.Line(label, len(by_metric[metric]) % 6 + 1, points))
            marks[metric] = best  # of the last set: evaluation stands behind training
    for curve in run.comparison:
        points = tuple((curve.first_round + 1 + i, v) for i, v in enumerate(curve.values) if is_number(v))
        lines = by_metric[curve.metric]
        if points:
            style = "wide" if "central" in curve.name.lower() else "line"
            lines.append(charts.Line(curve.name, len(lines) % 6 + 1, points, style))
    chief = run.best()
    for metric in sorted(by_metric, key=lambda one: chief is None or one != chief.metric.partition("-")[2]):
        lines = by_metric[metric]
        mark = (marks[metric].round + 1, f"best: {number(marks[metric].value)}") if metric in marks else None
        is_mean = metric in CURVE_METRICS and any("local" in line.name for line in lines)
        yield metric, charts.labelled_lines(lines, charts.Axis("round", mark=mark), metric), is_mean


def _times(run: RunRecord) -> tuple[str, list[str]]:
    """Return the picture of what rounds spend their time on, and the medians; nothing where that is not known."""
    stacks = []
    for key, (name, colour) in charts.STAGES.items():
        values = [row.stages.get(key) or 0.0 for row in run.rounds]
        if any(values):
            stacks.append((name, colour, values))
    rest = [max(row.seconds - sum(v or 0.0 for v in row.stages.values()), 0.0) for row in run.rounds]
    if sum(rest) > _VISIBLE_SHARE * sum(row.seconds for row in run.rounds):
        stacks.append(("other" if stacks else "whole round", 6, rest))
    if not stacks:
        return "", []
    bars = charts.stacked_bars([_shown(row) for row in run.rounds], stacks, "round", "seconds")
    medians = [f"{name} {statistics.median(values[1:]):.3g} s" for name, _, values in stacks if len(values) > 1]
    return charts.legend([(name, colour) for name, colour, _ in stacks]) + bars, medians


def _shown(row: RoundRow) -> int:
    """Return a round's number as people and the log count: from 1."""
    return row.round + 1


# -- messages ---------------------------------------------------------------------------------------------------------


def _bytes(run: RunRecord) -> str:
    rows = sorted(run.traffic, key=lambda row: -(row.bytes_out + row.bytes_in))
    if not rows:
        return ""
    codecs = list(dict.fromkeys(row.codec for row in rows))
    bars = [
        charts.Bar(
            row.kind.lower().replace("_", " "),
            row.bytes_out + row.bytes_in,
            f"{human_bytes(row.bytes_out)} out, {human_bytes(row.bytes_in)} in",
            _CODEC_COLOUR.get(row.codec, 6),
            f"{_meaning(row.kind)}: {row.messages:,} x, {row.seconds:.3g} s",
        )
        for row in rows
    ]
    return charts.legend([(codec.lower(), _CODEC_COLOUR.get(codec, 6)) for codec in codecs]) + charts.horizontal_bars(
        bars
    )


def is_readable(row: TrafficRow) -> bool:
    """Tell whether the server could read messages that are private."""
    return row.private and row.codec in CLEAR_CODECS


def threat_of(run: RunRecord, log: Log | None) -> tuple[ThreatModel | None, str]:
    """Return what is visible under the run's profile, and the release of the plugin that claims so; "" without one."""
    if plugin_of(run.profile) is None:
        return threat_model(run.profile), ""
    facts = plugin_protection([log] if log is not None else [])
    return threat_model(run.profile, facts), release_of(facts or {})


def _sealed(log: Log) -> Iterator[tuple[str, str, str, str, int, int]]:
    """Yield what this site's sealed messages held: (way, party, meaning, protection, messages, bytes)."""
    totals: dict[tuple[str, str, str, str], list[int]] = {}
    for part in log.parts:
        totals.setdefault((part.direction, part.peer, part.what, part.protection), []).append(part.size)
    for (direction, peer, what, protection), sizes in totals.items():
        yield "to" if direction == "sent" else "from", peer, *sealed_words(what, protection), len(sizes), sum(sizes)


def sealed_words(what: str, protection: str) -> tuple[str, str]:
    """Return what a part of a sealed message is, and what its reader sees of it."""
    content, known = Content.__members__.get(what), Protection.__members__.get(protection)
    return content.meaning if content else "unknown", known.value if known else "unknown"


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


def _own_figures(section: ReportSection) -> str:
    """Draw what this kind of job adds to the report."""
    figures = ""
    if section.curves:
        lines = [charts.Line(c.name, i % 6 + 1, c.points) for i, c in enumerate(section.curves)]
        figures += charts.labelled_lines(lines, section.x_label, section.y_label)
    if section.bars:
        bars = [charts.Bar(label, value, text, 1, f"{label}: {text}") for label, value, text in section.bars]
        figures += charts.horizontal_bars(bars)
    return figures


def of_scores(section: ReportSection, run: RunRecord) -> ClassFigures:
    """Draw what a section counts by scores of two classes."""
    classes = next((one.label_classes for one in run.data if len(one.label_classes) == 2), ("", "class 1"))
    return class_figures(section.scores, classes[1])


# -- model ------------------------------------------------------------------------------------------------------------


def _importance(run: RunRecord, folder: Path) -> tuple[str, str]:
    """Return bars of the features, and what to know of them."""
    if run.model is None or not (folder / run.model).is_file():
        return "", ""
    try:
        gain, weight = feature_importance(folder / run.model)
    except xgb.core.XGBoostError as error:
        text = str(error).splitlines()[0].replace(f"{folder / run.model}", run.model)  # a page may be passed on
        return "", f"XGBoost gives no importance for this model: {text}"
    if not gain:
        return "", "The model splits on no feature."
    has_gains = any(gain.values())  # trees that came from single sites have none
    shares = {name: (gain[name] if has_gains else 1.0) * weight[name] for name in gain}
    total = sum(shares.values())
    ranked = sorted(gain, key=lambda name: -shares[name])
    bars = []
    for name in ranked[:MAX_FEATURES]:
        splits = f"{weight[name]:,.0f} {'split' if weight[name] == 1 else 'splits'}"
        tip = f"{name}: mean gain {number(gain[name])} over {splits}" if has_gains else f"{name}: {splits}"
        bars.append(charts.Bar(name, shares[name] / total, f"{100 * shares[name] / total:.1f} %  ({splits})", 1, tip))
    rest = len(ranked) - MAX_FEATURES
    more = f" {rest} further features are not shown." if rest > 0 else ""
    of_gains = "Share of the total gain, and number of splits (weight). Point at a bar for the mean gain."
    of_splits = "Share of the splits, and their number (weight): the model carries no gains."
    return charts.horizontal_bars(bars), f"{of_gains if has_gains else of_splits}{more}"


def _release(folder: Path) -> dict[str, Any] | None:
    """Return what was measured of the model that is there, before it may leave; None if nothing was, or of another."""
    try:
        facts = json.loads((folder / RELEASE_FACTS).read_bytes())
        is_of_model = facts["model"] == hashlib.sha256((folder / facts["file"]).read_bytes()).hexdigest()
        return facts if is_of_model and isinstance(facts["findings"], list) else None
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None


def _tree(run: RunRecord, folder: Path) -> str:
    """Draw the model's first tree; nothing where there is none, or its leaves are vectors."""
    try:
        content = (folder / str(run.model)).read_bytes()
        learner = json.loads(content)["learner"]
        trees = trees_model(learner)["trees"]
        names = learner["feature_names"] or [f"f{n}" for n in range(int(learner["learner_model_param"]["num_feature"]))]
        if not trees or leaf_size(trees[0]) > 1:
            return ""
        return tree_chart(trees[0], names, categories_of(content))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return ""  # the importance says what is wrong with the model


def feature_importance(model: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return (mean gain, number of splits) per feature of a model file. Raises: XGBoostError."""
    booster = xgb.Booster()
    booster.load_model(model)
    return _scores(booster, "gain"), _scores(booster, "weight")


def _scores(booster: xgb.Booster, kind: str) -> dict[str, float]:
    scores = booster.get_score(importance_type=kind)
    return {name: value for name, value in scores.items() if isinstance(value, float)}  # lists are of linear models


def _settings(run: RunRecord) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for title, values in (
        ("XGBoost parameters", run.params),
        ("Job", run.settings),
        ("Cut points", run.cuts),
        ("Versions", run.versions),
    ):
        yield title, [(name, _text(value)) for name, value in values.items() if value not in (None, "", [], {})]


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else text[:199] + "\u2026"


# -- the summary -------------------------------------------------------------------------------------------------------


def build_summary(run: RunRecord, folder: Path, verification: Sequence[str] = ()) -> str:
    """Return the page as HTML.

    Args:
        folder: of the run, with the evidence that the record names.
        verification: what ``veilboost verify`` said of the exported evidence of all parties, sentence by sentence;
            empty if it was not asked.
    """
    evidence = own_evidence(run, folder)
    log = evidence if isinstance(evidence, Log) else None
    claims = plugin_protection([log] if log is not None else [])
    sizes: dict[str, int] = {}
    for row in run.traffic:  # rows never are sent: no kind of message holds any
        text = protection_text(run.profile, row.kind, row.codec, private=row.private)
        sizes[text] = sizes.get(text, 0) + row.bytes_out
    readers: dict[tuple[str, str], set[str]] = {}
    for part in log.parts if log is not None else ():
        if part.direction == "sent":
            readers.setdefault(sealed_words(part.what, part.protection), set()).add(part.peer)
    return charts.page(
        "summary.html",
        run=run,
        log=log,
        broken="" if log is not None or evidence is None else str(evidence),
        sent=[(size, text) for text, size in sorted(sizes.items(), key=lambda item: -item[1])],
        sealed=list(readers.items()),
        is_readable=any(map(is_readable, run.traffic)),
        model=threat_model(run.profile, claims),
        plugin=release_of(claims) if claims else "",
        consents=[(name, consent_words(name)) for name in run.consents],
        is_private=is_private(run.profile),
        verification=verification,
    )


def consent_words(name: str) -> str:
    """Return what a site agrees to by a consent."""
    known = name in Consents.__dataclass_fields__
    return description_of(Consents, name) if known else "unknown to this version"


def run_part(run: RunRecord, name: str = "") -> str:
    """Return what a notebook shows of a run (``_repr_html_``). Args: name: its heading; the job's own by default."""
    curve, best = next((chart for _, chart, _ in learning_curves(run)), ""), run.best()
    model, plugin = threat_of(run, None)
    at_best = next((row.metrics for row in run.rounds if best is not None and row.round == best.round), {})
    facts = {"key_figures": key_figures(run), "at_best": at_best, "curve": curve, "model": model, "plugin": plugin}
    return charts.in_light_colours(charts.page("part.html", name=name or run.called, run=run, **facts))
