"""``veilboost drift``: a batch of new rows beside those that a model was trained on, at one site."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import reason_of
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.base.formatting import fitted, printable
from nvflare_plugins.cli.options import Options, as_data_set, check_output, own_policy
from nvflare_plugins.cli.predict import training_set
from nvflare_plugins.data.declaration import DataSet, is_in_parts
from nvflare_plugins.pages.charts import Bar, horizontal_bars, legend, page, paired_bars
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.scoring.columns import POLICY
from nvflare_plugins.scoring.drift import Batch, Drift, features_of, scores_of
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.scoring.rows import RowReader, names_in
from nvflare_plugins.scoring.versions import ModelVersions
from nvflare_plugins.site.policy import SitePolicy

DRIFTED = 3
_SHOWN = 12
_MOST_BARS, _MOST_HISTOGRAMS = 30, 8


def run(options: Options) -> int:
    """Compare, print, and write page and JSON where asked."""
    if not 0 < options.threshold < float("inf"):
        raise ConfigurationError("--threshold must be a number above 0")
    if options.out is not None:
        check_output("--out", options.out, ".html")
    policy = own_policy(options)
    path = _model(policy, options.model)
    _check_output(options, path)
    record, model = RunRecord.read(path.parent), FinishedModel.read(path)
    name = training_set(policy, path.parent)
    if name is None:
        raise ConfigurationError(
            f"the policy of {policy.site} has no data set of the name that job {path.parent.name} was trained on, "
            "which says how files are read. Policy key: data_sets."
        )
    spec, facts = policy.data_sets[name], record.data[0]
    notes: list[str] = []
    before = _rows(options, spec, options.training, model, [])
    if before.n_rows != facts.rows:
        notes.append(
            f"The training rows are those of the file as it is now: {before.n_rows:,} rows, of which the job used "
            f"{facts.rows:,}."
        )
    now = _rows(options, spec, options.data, model, options.ignore)
    if not before.n_rows or not now.n_rows:
        raise ConfigurationError("there is nothing to compare: one of the files has no rows")
    features, scores = features_of(model, before, now, spec.dates), scores_of(model, before, now)
    document = {
        "model": options.model,
        "job": path.parent.name,
        "site": policy.site,
        "threshold": options.threshold,
        "training_rows": before.n_rows,
        "new_rows": now.n_rows,
        "scores": [dataclasses.asdict(one) for one in scores],
        "features": [dataclasses.asdict(one) for one in features],
        "drifted": [one.name for one in (*scores, *features) if one.index >= options.threshold],
        "notes": notes,
    }
    options.tell(**document)
    _print(scores, features, document)
    if options.out is not None:
        try:
            write_atomically(options.out, build_page(document).encode(), 0o600)
            target = write_atomically(options.out.with_suffix(".json"), json.dumps(document, indent=1).encode(), 0o600)
        except OSError as error:
            shown = printable(str(options.out))
            raise ConfigurationError(f"--out {shown} cannot be written: {reason_of(error)}") from None
        print(f"wrote {options.out} and {target.name}: for this site only, sent nowhere")
    return DRIFTED if document["drifted"] else 0


def build_page(document: Mapping[str, Any]) -> str:
    """Return the page as HTML. Args: document: what the command writes as JSON."""
    threshold, found = document["threshold"], (*document["scores"], *document["features"])
    longest = max([threshold, *(one["index"] for one in found)])  # one scale for scores and columns
    figures: dict[str, Any] = {}
    for what in ("scores", "features"):
        bars = [
            Bar(one["name"], one["index"], f"{one['index']:.3f}", 5 if one["index"] >= threshold else 1)
            for one in document[what][:_MOST_BARS]
        ]
        figures[f"of_{what}"] = horizontal_bars(bars, longest, threshold)
        figures[f"shares_of_{what}"] = [(one["name"], _shares(one)) for one in document[what][:_MOST_HISTOGRAMS]]
    key = legend([("training rows", 1), ("new rows", 2)])
    return page("drift.html", **document, **figures, key=key)


def _shares(one: Mapping[str, Any]) -> str:
    """Draw the bins of both batches; that of missing values, the last one, only where there are some."""
    n = len(one["labels"]) - (one["missing_before"] == one["missing_now"] == 0)
    return paired_bars(one["labels"][:n], list(zip(one["before"][:n], one["now"][:n], strict=True)))


def _check_output(options: Options, model: Path) -> None:
    """Refuse names of files that are no page of drift: a run's folder holds others of such names."""
    if options.out is None:
        return
    shown, target = printable(str(options.out)), options.out.with_suffix(".json")
    try:
        is_own = not target.exists() or "drifted" in json.loads(target.read_bytes())
    except (ValueError, TypeError, RecursionError):
        is_own = False
    given = [path for path in (model, options.data, options.training) if path is not None and path.exists()]
    if not is_own or any(out.exists() and out.samefile(path) for out in (options.out, target) for path in given):
        raise ConfigurationError(
            f"--out {shown} would overwrite {target.name} beside it, which no earlier `veilboost drift` has written: "
            "choose another name"
        )


def _model(policy: SitePolicy, reference: str) -> Path:
    """Return the file of a model by its name, or by the job that left it."""
    versions = ModelVersions(policy.runs)
    of_job = [one for one in versions.found() if one.job == reference]
    if of_job and reference.partition("@")[0] not in versions.names():
        return policy.runs / of_job[-1].job / of_job[-1].file
    return versions.path(reference)


def _rows(options: Options, spec: DataSet, path: Path | None, model: FinishedModel, ignored: list[str]) -> Batch:
    """Read a file as the training set is read; its label and weight, and rows' ids, are no features."""
    if path is not None:
        shown = printable(str(path))
        if not (is_in_parts(path) or path.is_file()):
            raise ConfigurationError(f"{shown} is no file, and no folder of Parquet files")
        spec = as_data_set(options, path, spec, shown)
    known = {feature.name for feature in model.features}
    others = _others(spec, known, ignored)
    rows = RowReader(spec, model.features, ignored=others, unknown_is_missing=True, remedies=POLICY)
    return rows if spec.in_passes else rows.read()


def _others(spec: DataSet, known: set[str], ignored: list[str]) -> list[str]:
    """Return the columns that are no features: what the job did not take is no drift of the model."""
    present = names_in(spec, POLICY)
    missing = [name for name in ignored if name not in present]
    if missing:
        raise ConfigurationError(f"--ignore {printable(missing[0])!r}: {spec.name} has no such column")
    return [name for name in present if name not in known and name not in spec.no_features]


def _print(scores: list[Drift], features: list[Drift], document: dict[str, Any]) -> None:
    print(f"{'':<32} {'index':>7} {'chance':>7} {'missing':>16}  unknown categories")
    for one in (*scores, *features[:_SHOWN]):
        rates = f"{one.missing_before:.1%} to {one.missing_now:.1%}"
        new = ", ".join(f"{printable(text, 40)} ({rows})" for text, rows in one.new_categories.items())
        unknown = f"{one.unknown} rows {new}" if one.unknown else ""
        print(f"{fitted(one.name, 32)} {one.index:>7.3f} {one.by_chance:>7.3f} {rates:>16}  {unknown}")
    if len(features) > _SHOWN:
        print(f"and {len(features) - _SHOWN} columns with smaller indices")
    for note in document["notes"]:
        print(f"note: {note}")
    drifted = document["drifted"]
    said = f"drift: {', '.join(printable(name, 60) for name in drifted[:_SHOWN])}" if drifted else "no drift"
    print(f"{said} (threshold {document['threshold']:g})")
