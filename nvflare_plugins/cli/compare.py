"""``veilboost compare``: what joining is worth to a site, on its own rows, as a page that stays there."""

from __future__ import annotations

from pathlib import Path

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.cli.options import Options
from nvflare_plugins.data.table import Table
from nvflare_plugins.evidence.threat_model import is_horizontal
from nvflare_plugins.pages.local_page import FILE_NAME, Comparison, build_page
from nvflare_plugins.pages.run_record import EVALUATION, TRAINING, DataFacts, RunRecord
from nvflare_plugins.scoring.comparison import (
    best_rounds,
    check_rows,
    compare,
    curve,
    metrics_of,
    scores_after,
    train_alone,
)
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.scoring.rows import load_again
from nvflare_plugins.site.policy import SitePolicy, own_workspace
from nvflare_plugins.site.policy_values import POLICY_FILE
from nvflare_plugins.xgb.model_json import with_lists


def run(options: Options) -> int:
    """Train on the site's own rows, compare, write the page into the run's folder."""
    record = RunRecord.read(options.run_folder)
    facts = _facts(record, options.run_folder)
    policy = _policy(options, record)
    evaluation_name = options.data_set or next((one.name for one in record.data if one.use == EVALUATION), None)
    if evaluation_name is None:
        raise ConfigurationError(
            "the job had no eval_data_set: name rows of this site that the model was not trained on, as a data set of "
            "its policy: --data-set NAME"
        )
    if evaluation_name == facts.name:
        raise ConfigurationError(f"the model was trained on data set {facts.name!r}: name another one")
    training = load_again(policy.data_set(facts.name), facts, record, takes_passes=True)
    evaluation = load_again(policy.data_set(evaluation_name), facts, record, takes_passes=True)
    notes = _changes(record, {facts.name: training, evaluation_name: evaluation})
    result = _compared(record, options.run_folder, facts, training, evaluation, notes)
    path = write_atomically(options.run_folder / FILE_NAME, build_page(result).encode(), 0o600)
    for one in result.metrics:
        print(
            f"{one.name:<18} alone {one.best_alone:.4g}  federated {one.federated:.4g}  "
            f"difference {one.federated - one.best_alone:+.4g} ({one.low:+.3g} to {one.high:+.3g}): {one.verdict}"
        )
    print(f"wrote {path}: for this site only, sent nowhere")
    return 0


def _facts(record: RunRecord, folder: Path) -> DataFacts:
    """Return the training set of a horizontal run. Raises: ConfigurationError, for other runs."""
    facts = next((one for one in record.data if one.use == TRAINING), None)
    if not is_horizontal(record.profile) or record.model is None or facts is None:
        raise ConfigurationError(
            f"{folder} is of no horizontal training: a site of another kind of job cannot train such a model by itself"
        )
    return facts


def _policy(options: Options, record: RunRecord) -> SitePolicy:
    workspace = options.workspace
    if workspace is None:
        workspace = options.run_folder.resolve().parent.parent
        if not (workspace / POLICY_FILE).is_file():
            raise ConfigurationError("the run does not lie in the site's workspace: name that with --workspace DIR")
    return SitePolicy.load(own_workspace(workspace, record.site), record.site)


def _changes(record: RunRecord, tables: dict[str, Table]) -> tuple[str, ...]:
    """Say which files are no longer those of the run."""
    return tuple(
        f"Data set {one.name} had {one.rows:,} rows in the run and has {tables[one.name].n_rows:,} now."
        for one in record.data
        if one.name in tables and tables[one.name].n_rows != one.rows
    )


def _compared(
    record: RunRecord, folder: Path, facts: DataFacts, training: Table, evaluation: Table, notes: tuple[str, ...]
) -> Comparison:
    federated = FinishedModel.read(folder / str(record.model))
    check_rows(training, evaluation, None if federated.classes is None else len(federated.classes))
    n_rounds, metrics = federated.n_rounds, metrics_of(federated)
    tuned_rounds = best_rounds(record.params, training, n_rounds)

    def own(rounds: int) -> FinishedModel:
        booster = train_alone(record.params, training, rounds)
        lists = {name: list(entries) for name, entries in facts.categories.items()}
        content = with_lists(bytes(booster.save_raw("json")), facts.columns, lists, facts.label_classes or None)
        return FinishedModel(content, "the model of this site's own rows")

    alone = own(n_rounds)
    (of_alone,), (of_federated,) = scores_after(alone, evaluation), scores_after(federated, evaluation)
    of_tuned = None if tuned_rounds is None else scores_after(own(tuned_rounds), evaluation)[0]
    measured = compare(metrics, evaluation, of_alone, of_tuned, of_federated)
    first = metrics[0]
    curves = tuple(
        (name, curve(first, evaluation, model, n_rounds))
        for name, model in (("this site alone", alone), ("federated", federated))
    )
    return Comparison(
        record.job_id,
        record.site,
        facts.name,
        training.n_rows,
        evaluation.n_rows,
        n_rounds,
        tuned_rounds,
        measured,
        first.name,
        curves,
        notes,
    )
