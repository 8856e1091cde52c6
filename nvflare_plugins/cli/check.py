"""``veilboost check`` and ``agree``: a survey of a site's own table; the drafts of several sites become one job."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import reason_of
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.base.formatting import counted, printable
from nvflare_plugins.cli.main import parse
from nvflare_plugins.cli.options import DAMAGED, Options, as_data_set, check_output
from nvflare_plugins.cli.site_setup import readers
from nvflare_plugins.cli.sites import READERS
from nvflare_plugins.data.declaration import MISSING_TEXTS, DataSet, format_of
from nvflare_plugins.data.labels import Label, label_of_words, words_of_label
from nvflare_plugins.kinds.bagging.job import BaggingJob
from nvflare_plugins.kinds.private_trees.job import PrivateTreesJob
from nvflare_plugins.kinds.vertical.job import VerticalJob
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.site.policy import SitePolicy, own_workspace
from nvflare_plugins.site.policy_values import is_private
from nvflare_plugins.survey.agreement import Agreement, SiteDraft, agree, lines
from nvflare_plugins.survey.columns import Finding, Use
from nvflare_plugins.survey.survey import Draft, Survey, survey
from nvflare_plugins.xgb.objectives import COX, objective_facts


def run(options: Options) -> int:
    """Look, and say what was found."""
    job = None
    if options.job is not None:
        from nvflare_plugins.flare.kinds import read_job

        job = read_job(options.job)
    policy, sets = _sets_of(options, job)
    label = None if options.label is None else label_of_words(options.label)
    results = [(one, survey(one, use_of(job, label, policy.site, one.name), options.progress)) for one in sets]
    if options.draft is not None:
        check_output("--draft", options.draft, ".json")
        drafts = [_document(one, found, [])["draft"] | {"name": one.name} for one, found in results]
        write_atomically(options.draft, json.dumps(drafts, indent=1, ensure_ascii=False).encode(), 0o600)
    surveys = [(one, found, [*found.findings, *floors(found, job, policy)]) for one, found in results]
    if options.json:
        print(json.dumps([_document(*one) for one in surveys], indent=2))
    else:
        for one, found, findings in surveys:
            print("\n".join(_lines(one, found, findings, is_private=job is not None and _is_private(job))))
    return int(any(finding.is_problem for _, _, findings in surveys for finding in findings))


def _sets_of(options: Options, job: Any) -> tuple[SitePolicy, list[DataSet]]:
    """Return what is to be looked at, of a workspace or of one file, and under which policy."""
    if options.where.is_dir():
        if options.names or options.format:
            raise ConfigurationError("--names and --format belong to a file: a data set's stand in the site's policy")
        if options.site is None:
            raise ConfigurationError("a workspace needs the name of the site: --site NAME")
        policy = SitePolicy.load(own_workspace(options.where, options.site), options.site)
        names = [options.data_set] if options.data_set else _data_sets_of(job)
        if not names:
            raise ConfigurationError("say what to check: --data-set NAME, or --job JOB_FOLDER")
        return policy, [policy.data_set(name) for name in names]
    if options.site or options.data_set:
        raise ConfigurationError("--site and --data-set belong to a workspace, and this is no folder")
    policy = SitePolicy.from_dict({}, workspace=options.where.parent, site="site")
    name = Path(options.where.name.lower().removesuffix(".gz")).stem
    return policy, [as_data_set(options, options.where, DataSet(name, options.where.absolute(), "csv"), name)]


# -- what a job asks for ----------------------------------------------------------------------------------------------


def _data_sets_of(job: Any) -> list[str]:
    names = [getattr(job, field, None) for field in ("data_set", "eval_data_set")]
    return list(dict.fromkeys(name for name in names if name is not None))


def _is_private(job: Any) -> bool:
    return is_private(str(getattr(job, "profile", "")))


def use_of(job: Any, label: Label | None, site: str, data_set: str) -> Use:
    """Return what a job, or a label alone, asks of the data set."""
    if job is None:
        return Use(label=label)
    active = getattr(job, "active", None)
    has_label = active is None or active == site
    features = getattr(job, "features", None)
    if isinstance(features, dict):  # by party
        features = features.get(site)
    if not hasattr(job, "label"):  # an alignment reads ids alone, a prediction what its model names
        features = []
    lists = getattr(job, "categories", None) or {}
    if active is not None:  # by party, too
        lists = lists.get(site, {})
    classes = getattr(job, "label_classes", None) if has_label else None
    return Use(
        label=getattr(job, "label", None) if has_label else None,
        weight=getattr(job, "weight", None) if has_label else None,
        query=getattr(job, "query", None) if has_label else None,
        features=None if features is None else tuple(features),
        categories={name: tuple(map(str, values)) for name, values in lists.items()},
        label_classes=None if classes is None else tuple(map(str, classes)),
        unknown_is_missing=_is_private(job) or bool(getattr(job, "unknown_category_is_missing", False)),
        is_settled=True,
        may_lack_rows=isinstance(job, HorizontalJob) or _is_private(job),
        drops_unlabelled=active is None,
        **(_of_objective(job, data_set) if has_label else {}),
    )


def _of_objective(job: Any, data_set: str) -> dict[str, Any]:
    """Return what a job takes of labels, as fields of ``Use``; none where it takes all or does not say."""
    if isinstance(job, PrivateTreesJob):
        return {"accepts": job.accepts}
    if _is_private(job) and not hasattr(job, "params"):
        is_number = getattr(job, "label_bounds", None) is not None
        return {"accepts": np.isfinite if is_number else lambda label: np.isin(label, (0.0, 1.0))}
    params = getattr(job, "params", None)
    if not isinstance(params, dict) or "objective" not in params:
        return {}
    facts = objective_facts(params)
    needs_events = facts.name == COX and data_set == getattr(job, "data_set", None)
    return {"accepts": facts.accepts, "label_words": facts.label_words, "needs_events": needs_events}


def floors(found: Survey, job: Any, policy: SitePolicy) -> Iterator[Finding]:
    """Yield what is the matter with the number of rows."""
    least = policy.min_effective_rows
    if 0 < found.n_rows < least and not _is_private(job):
        alone = isinstance(job, BaggingJob)
        words = f"there are fewer rows than {least}: " + (
            "each site of bagging needs as many. Policy key: min_effective_rows"
            if alone
            else "all sites of a horizontal job together need as many. Policy key: min_effective_rows"
        )
        yield Finding("few_rows", words, alone, count=found.n_rows)
    if isinstance(job, VerticalJob) and 0 < found.n_rows < policy.vertical.min_intersection:
        words = f"there are fewer rows than the {policy.vertical.min_intersection} that the parties must share. "
        yield Finding("few_rows", words + "Policy key: vertical.min_intersection", count=found.n_rows)


# -- for people -------------------------------------------------------------------------------------------------------


def _lines(one: DataSet, found: Survey, findings: list[Finding], *, is_private: bool) -> Iterator[str]:
    problems = [finding for finding in findings if finding.is_problem]
    notes = [finding for finding in findings if not finding.is_problem]
    said = counted(len(problems), "problem") if problems else "no problems"
    yield f"{printable(str(one.path), 300)}: {counted(found.n_rows, 'row')}, {said}, {counted(len(notes), 'note')}"
    for title, group in (("Problems", problems), ("Notes", notes)):
        if group:
            yield f"\n{title} (rows are counted from 1, without the header):"
            yield from (f"  - {sentence(finding)}" for finding in group)
    if is_private and problems:
        yield "\nA private job is refused for no value: it repairs, or leaves out, each row by itself, without a word."
    yield from _draft(one, found.draft)


def sentence(finding: Finding) -> str:
    """Return a finding in words, with its count and its first row."""
    where = []
    if finding.count is not None:
        where.append(str(finding.count))
    if finding.first_row is not None:
        where.append(f"first in row {finding.first_row}")
    return printable(finding.text, 1000) + (f" ({', '.join(where)})" if where else "")


def _draft(one: DataSet, draft: Draft) -> Iterator[str]:
    if draft.options or one.names:
        options = {**({"names": list(one.names)} if one.names else {}), **draft.options}
        if format_of(one.path) is None and one.loader is None and one.path.is_file():
            options["format"] = one.format
        yield f"\nFor the policy, as data_sets.{printable(one.name)}:"
        yield f"  {_json({'path': str(one.path), **options})}"
        if (line := site_setup(one.name, options, one.path)) is not None:
            yield f"or: veilboost site-setup DIR {line}"
        else:
            yield "(no line of a shell says that: put it into the policy's file)"
    if draft.dates:
        yield f"\nDates are left out of features: {_python(list(draft.dates))}. Rows to score lie after all days that a"
        yield "model has seen, and a day may tell who was there. To train on them all the same, add them to features."
    yield from recipe_lines(draft.features, draft.categories, draft.label_classes, draft.feature_bounds)


def recipe_lines(
    features: Sequence[str],
    categories: Mapping[str, Sequence[str]],
    label_classes: Sequence[str] | None,
    bounds: Mapping[str, tuple[float, float]],
) -> Iterator[str]:
    """Yield what a recipe would say."""
    if not features:
        return
    yield "\nFor a recipe. Lists are taken from data and become public with the job: complete them from what is"
    yield "known anyway. Ids, dates, constants and free text are left out."
    yield f"  features={_python(list(features))},"
    if categories:
        yield f"  categories={_python({name: list(values) for name, values in categories.items()})},"
    if label_classes is not None:
        yield f"  label_classes={_python(list(label_classes))},"
    if bounds:
        yield "  # Taken from data, rounded outwards: NOT for private jobs, whose bounds come from public knowledge."
        yield f"  # feature_bounds={_python(dict(bounds))},"


def _json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


def _python(value: object) -> str:
    text = repr(value)
    return printable(text, len(text))


def words_of(name: str, options: Mapping[str, Any]) -> list[str]:
    """Return the options of ``veilboost site-setup`` that say so of a data set."""
    words: list[str] = []
    for key, value in options.items():
        option, *_ = READERS[key]
        if key == "drop_unlabelled":
            words += [option, name]
        elif key == "id_form":
            steps = [f"{step}={of}" if isinstance(of, str) else step for step, of in value.items()]
            words += [option, f"{name}={','.join(steps)}"]
        elif key == "names":
            words += [option, f"{name}={json.dumps(value, ensure_ascii=False)}"]
        elif isinstance(value, dict):
            told = {column: of if isinstance(of, str) else _json(of) for column, of in value.items()}
            words += [word for column, of in told.items() for word in (option, f"{name}={column}={of}")]
        elif isinstance(value, list):
            words += [word for text in value if text not in MISSING_TEXTS for word in (option, f"{name}={text}")]
        else:
            words += [option, f"{name}={value if value.isprintable() else json.dumps(value)[1:-1]}"]
    return words


def site_setup(name: str, options: Mapping[str, Any], path: Path | None) -> str | None:
    """Return the options of ``veilboost site-setup`` that say the same; None if they cannot."""
    words = [*([] if path is None else ["--data-set", f"{name}={path}"]), *words_of(name, options)]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            said = parse(["site-setup", "DIR", *words])
    except SystemExit:  # a name that begins like an option
        return None
    wanted = dict(options)
    if "missing" in wanted:
        wanted["missing"] = [text for text in wanted["missing"] if text not in MISSING_TEXTS]
    is_same = said.data_sets == ([] if path is None else [(name, str(path))])
    is_same = is_same and readers(said) == ({name: wanted} if wanted else {})
    text = shlex.join(words)
    return text if is_same and text.isprintable() and "{site}" not in text else None


def _document(one: DataSet, found: Survey, findings: list[Finding]) -> dict[str, Any]:
    draft = found.draft
    return {
        "data_set": one.name,
        "rows": found.n_rows,
        "is_fine": not any(finding.is_problem for finding in findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "draft": {
            "features": draft.features,
            "label": None if found.label is None else words_of_label(found.label),
            "dates": draft.dates,
            "ids": {name: dataclasses.asdict(shape) for name, shape in draft.id_forms.items()},
            "categories": dict(draft.categories),
            "label_classes": draft.label_classes,
            "feature_bounds": {
                "taken_from_data": True,
                "for_private_jobs": False,
                "bounds": dict(draft.feature_bounds),
            },
            "data_set": dict(draft.options),
        },
    }


def agree_drafts(options: Options) -> int:
    """Unite, show what differs, write."""
    if options.out is not None:
        check_output("--out", options.out, ".json")
    sites = [path.stem for path in options.drafts]
    if len(set(sites)) < len(sites):
        raise ConfigurationError("two drafts have the same name, which is their site's: name the files after the sites")
    found = agree({path.stem: _draft_in(path) for path in options.drafts})
    document = _agreed(found, options.data_set)
    is_inert = json.dumps(document, ensure_ascii=False).isprintable()  # else marks of others steer a terminal
    written = json.dumps(document, indent=1, ensure_ascii=not is_inert)
    if options.out is not None:
        write_atomically(options.out, written.encode(), 0o600)
    if options.json:
        print(written)
        return int(not found.is_whole)
    _show(found, options.data_set)
    if options.out is not None:
        print(f"\nwrote {options.out}")
    return int(not found.is_whole)


def _show(found: Agreement, data_set: str) -> None:
    for text in lines(found) if found.differences else ["The drafts agree."]:
        print(printable(text, 1000))
    for site, of_policy in found.options.items():
        if of_policy:
            line = site_setup(data_set, of_policy, None)
            said = "see --out: no line of a shell says it" if line is None else f"veilboost site-setup DIR {line}"
            print(f"\nAt {printable(site)}: {said}")
    print("\n".join(recipe_lines(found.features, found.categories, found.label_classes, found.feature_bounds)))


def _draft_in(path: Path) -> SiteDraft:
    """Read a draft, or what ``veilboost check --json`` printed. Raises: ConfigurationError."""
    try:
        (document,) = json.loads(path.read_bytes())
        return SiteDraft.from_dict(document.get("draft", document))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {reason_of(error)}") from None
    except (*DAMAGED, ConfigurationError, RecursionError):
        raise ConfigurationError(
            f"{path} is no draft of one data set: write it with `veilboost check FILE --label COLUMN --draft SITE.json`"
        ) from None


def _agreed(found: Agreement, data_set: str) -> dict[str, Any]:
    return {
        "agrees": found.is_whole,
        "job": {
            "data_set": data_set,
            "label": found.label,
            "features": found.features,
            "categories": found.categories,
            "label_classes": found.label_classes,
        },
        "dates": found.dates,
        "feature_bounds": {"taken_from_data": True, "for_private_jobs": False, "bounds": found.feature_bounds},
        "differences": [dataclasses.asdict(one) for one in found.differences],
        "policies": {site: {"data_sets": {data_set: of}} for site, of in found.options.items()},
    }
