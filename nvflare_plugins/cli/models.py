"""Commands for finished models: compare, score, export, name them, and see whether new rows are still like the old."""

from __future__ import annotations

import json
from pathlib import Path

import click

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import reason_of
from nvflare_plugins.base.files import write_atomically, write_private
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.cli.options import (
    FILE_OPTIONS,
    PATH,
    SITE,
    WORKSPACE,
    Options,
    argument,
    check_output,
    command,
    option,
    own_policy,
)
from nvflare_plugins.data.declaration import ENCODINGS

ONNX, TREELITE = ".onnx", ".treelite"
_IGNORE = option("--ignore", metavar="COLUMN", multiple=True, help="column that is no feature")


@command(
    "compare the model of a horizontal job with one of this site's own rows",
    argument("run_folder", metavar="RUN_DIR", type=PATH, help="folder of a run at a site"),
    option("--workspace", metavar="DIR", type=PATH, help="the site's workspace (default: where RUN_DIR lies)"),
    option("--data-set", metavar="NAME", help="rows to compare on, a data set of the policy (default: the job's own)"),
)
def compare(options: Options) -> int:
    """``veilboost compare``: what joining a horizontal job was worth to this site, as numbers. Sends nothing.

    It trains XGBoost on the site's own training rows with the job's parameters, scores the site's own evaluation rows
    with that model and with the job's, and writes both side by side, with an interval for the difference, into
    local.html in the run's folder. No job asks for it or sees it: it is for the site alone (mode 0600).
    """
    from nvflare_plugins.cli.runs import compare_runs

    return compare_runs(options)


@command(
    "score a file with a finished model",
    argument(
        "model",
        metavar="MODEL",
        type=PATH,
        help="model.json of a run, merged_model.json, or the name of a model (veilboost models), NAME or NAME@VERSION",
    ),
    argument(
        "data", metavar="DATA", type=PATH, help="rows to score: CSV (also .csv.gz) or Parquet, also a folder of files"
    ),
    option("--out", metavar="FILE", type=PATH, required=True, help="file to write: .csv or .parquet"),
    option(
        "--explain",
        is_flag=True,
        help="SHAP values too, and a picture beside the file (.svg); of a private run the noise in each score",
    ),
    option(
        "--threshold", type=float, help="probability above which a row is of the second of two classes (default: 0.5)"
    ),
    option("--id", metavar="COLUMN", help="column that names the rows, kept in the file that is written"),
    _IGNORE,
    option("--unknown-is-missing", is_flag=True, help="categories in no list count as missing"),
    option(
        "--rounds",
        type=click.Choice(["all", "best"]),
        default="all",
        help="best: up to the best round of early stopping",
    ),
    option("--missing", metavar="TEXT", multiple=True, help="one more text for missing"),
    option("--separator", metavar="CHARACTER", help="between the columns of a CSV file (default: a comma)"),
    option("--encoding", type=click.Choice(ENCODINGS), help="of a CSV file (default: utf-8)"),
    option("--workspace", metavar="DIR", type=PATH, help="read it as a data set of the site in this workspace is read"),
    option("--site", metavar="NAME", help="the site's name; with a workspace"),
    option("--data-set", metavar="NAME", help="the data set of the site's policy; with a workspace"),
    *FILE_OPTIONS,
)
def predict(options: Options) -> int:
    """``veilboost predict``: score a file of rows with a finished model, at one site. Sends nothing.

    Columns go by name, in any order; classes are written under the names that the job declared. Nothing is written
    unless everything fits, and what is written is for its owner alone (mode 0600).
    """
    from nvflare_plugins.cli.predict import run

    return run(options)


@command(
    "write a copy of a model that may leave the site: XGBoost's JSON, ONNX, or treelite",
    argument("model", metavar="MODEL", type=PATH, help="model.json of a run"),
    argument(
        "output",
        metavar="OUTPUT",
        type=PATH,
        help="file to write: .onnx, .treelite, or any other name for XGBoost's own JSON",
    ),
)
def export(options: Options) -> int:
    """``veilboost export``: a copy of a model that may leave the site.

    XGBoost writes into every node how much hessian its rows weigh (``sum_hessian``), from which row counts follow. A
    copy for others has NaN there and says so; structure, thresholds and leaves, which predictions need, stay and go on
    telling something about the data. ONNX and treelite hold no hessian.
    """
    from nvflare_plugins.dossier.release import check_copied
    from nvflare_plugins.scoring.export import strip_sum_hessian, to_onnx, to_treelite
    from nvflare_plugins.scoring.model import FinishedModel

    output, suffix = options.output, options.output.suffix.lower()
    check_output("the copy", output, ".json", ONNX, TREELITE)
    if output.exists() and options.model.exists() and output.samefile(options.model):
        raise ConfigurationError(f"{output} is the model itself, which would lose its covers: name another file")
    if suffix in (ONNX, TREELITE):
        found = FinishedModel.read(options.model)
        check_copied(options.model, found.content)
        content = (to_onnx if suffix == ONNX else to_treelite)(found)
        what = "row counts are not in it"
    else:
        try:
            model = options.model.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"cannot read {options.model}: {error.strerror}") from None
        check_copied(options.model, model)
        content = strip_sum_hessian(model)
        what = "sum_hessian is NaN throughout, so that no SHAP values come from it"
    try:
        write_atomically(output, content)
    except OSError as error:
        raise ConfigurationError(f"{output} cannot be written: {reason_of(error)}") from None
    options.tell(copy=output)
    print(f"wrote {output}: {what}; thresholds and leaves still tell about the data")
    return 0


@command(
    "write the points of a model of single splits: a scorecard",
    argument("model", metavar="MODEL", type=PATH, help="model.json of a run with max_depth 1, for two classes"),
    argument("output", metavar="OUTPUT", type=PATH, help="file to write: .csv or .json"),
    option("--profile", metavar="FILE", type=PATH, help="profile.json of a profile of the same columns"),
    option("--pdo", type=float, default=20.0, help="points that double the odds (default: 20)"),
    option("--score", type=float, default=600.0, help="points at --odds (default: 600)"),
    option("--odds", type=float, default=50.0, help="of the first class to the second (default: 50)"),
    option("--reverse", is_flag=True, help="more points for more of the second class; --odds are its own then"),
    option("--whole", is_flag=True, help="round each bin's points to whole numbers"),
)
def scorecard(options: Options) -> int:
    """``veilboost scorecard``: bins, weights of evidence, leaves and points of a model. Sends nothing.

    The points of a row add up to offset - factor x log-odds of the second class: --score at --odds, and --pdo more for
    each doubling, as optbinning's pdo_odds. Trees of one split give a card that is the model. With --profile each bin
    has its weight of evidence. A card is a copy of the model: where the site's policy has release_rules, a decision
    comes first.
    """
    from nvflare_plugins.dossier.release import check_copied
    from nvflare_plugins.scoring.model import FinishedModel
    from nvflare_plugins.scoring.scorecard import Scaling, Scorecard

    output = options.output
    check_output("the scorecard", output, ".csv", ".json")
    model = FinishedModel.read(options.model)
    check_copied(options.model, model.content)
    scaling = Scaling(options.pdo, options.score, options.odds, options.reverse, options.whole)
    card = Scorecard(model, scaling, options.profile)
    is_table = output.suffix.lower() == ".csv"
    content = card.table() if is_table else json.dumps(card.document(), ensure_ascii=False, indent=1).encode()
    try:
        write_private(output, content)
    except OSError as error:
        raise ConfigurationError(f"{output} cannot be written: {reason_of(error)}") from None
    n_columns = len({one.feature for one in card.bins})
    options.tell(scorecard=output, columns=n_columns, bins=len(card.bins))
    print(f"wrote {output}: {len(card.bins)} bins of {n_columns} columns; thresholds and leaves tell about the data")
    return 0


@command(
    "judge by the site's rules whether a model may leave, and write the signed decision",
    argument("model", metavar="[MODEL]", type=PATH, required=False, help="a run's folder, or the model.json in it"),
    option("--rules", metavar="FILE", type=PATH, help="rules as JSON (default: release_rules of the site's policy)"),
    option("--by", metavar="NAME", help="who decides; stands in the decision"),
    option("--data", metavar="FILE", type=PATH, help="the training rows (default: the data set as it is now)"),
    option("--workspace", metavar="DIR", type=PATH, help="the site's workspace (default: where MODEL lies)"),
    option("--write-rules", metavar="FILE.json", type=PATH, help="write the default rules, and nothing else"),
    *FILE_OPTIONS,
    exits={0: "released, or written", 3: "refused: a rule is broken; the decision says so"},
)
def release(options: Options) -> int:
    """``veilboost release MODEL --by NAME``: may this model leave the site? Sends nothing.

    It judges the model of a run on the rows that it was trained on here: how many share a prediction, few rows behind
    a leaf, predictions without doubt, too many numbers for the rows, settings that are easy to attack. A private model
    is judged by the epsilon that its job has spent. Each broken rule is named with measure, limit and remedy.

    The decision, release.json in the run's folder, binds model, rules, measures and evidence, is signed with the key of
    the site's FLARE certificate, and `veilboost verify` checks it. Where the policy has release_rules, `export` and
    `models` want an approval under them. It binds this site's copy alone: other sites hold the same model.
    """
    from nvflare_plugins.cli.dossier import decide_release

    return decide_release(options)


@command(
    "ask a job that stays (action serve) for scores of rows",
    argument("job", metavar="JOB_ID", help="the job that stays"),
    argument("rows", nargs=-1, metavar="[ROW]...", help="positions in the alignment; none reads standard input"),
    option("--ids", is_flag=True, help="the rows are ids of this site"),
    option("--status", is_flag=True, help="say what was answered so far, and how fast"),
    option("--refresh", metavar="JOB_ID", help="take the rows of that alignment, at all parties"),
    option("--stop", is_flag=True, help="end the job at all parties"),
    option("--workspace", metavar="DIR", type=PATH, help="the site's workspace"),
    option("--site", metavar="NAME", help="the site's name"),
    option("--socket", metavar="PATH", help="the job's socket, in place of --workspace and --site"),
    prints_json=True,
    exits={0: "all answered", 1: "an error among the answers, or no job there"},
)
def score(options: Options) -> int:
    """``veilboost score JOB_ID ROW ...``: ask a vertical job that stays (action `serve`) for scores.

    It runs at the party that has the label, as the user that runs FLARE there, and speaks to the job over a Unix socket
    in the run's folder. Rows are positions in the alignment in use, or with --ids this site's own ids; write them right
    after the job. Without rows it reads requests from standard input, one JSON object a line: {"rows": [0, 17]},
    {"ids": ["a"]}, {"status": true}, {"refresh": "JOB_ID"} or {"stop": true}. For each it prints one line of JSON:
    {"scores": [...]} with row, class and probability (a regression: prediction), or {"error": text}.

    --refresh takes the rows of a newer alignment (of a job of kind alignment, say) at all parties, or at none. --stop
    ends the job, whose reports and evidence are then written as after any job.

    """
    from nvflare_plugins.cli.predict import score_one

    return score_one(options)


@command(
    "list the models that a site has from its jobs, name them, go back to an earlier version",
    argument("action", metavar="[list|add|rollback]", type=click.Choice(["list", "add", "rollback"]), default="list"),
    argument("arguments", nargs=-1, metavar="[ARGUMENT]...", help="add: NAME JOB_ID; rollback: NAME VERSION"),
    WORKSPACE,
    SITE,
)
def models(options: Options) -> int:
    """``veilboost models``: the models that a site has from its jobs, and which of them is in use.

    Without more it lists them: when the job ended, the model's name and version, the data set it was trained on,
    rounds, the hash of its bytes, metrics of the last round. `add NAME JOB_ID` makes a job's model the next version of
    NAME and puts it in use; `rollback NAME VERSION` puts another version in use. `veilboost predict NAME FILE` takes
    the version in use, `NAME@2` that version. Nothing is copied or deleted, and the change is there whole or not at
    all.
    """
    from nvflare_plugins.scoring.versions import ModelVersions, describe, is_number
    from nvflare_plugins.site.memory.forgetting import replaced_jobs

    def may_be_used(path: Path) -> None:
        from nvflare_plugins.dossier.release import check_released  # XGBoost, which listing models does not need

        if (by := replaced.get(path.parent.name)) is not None:
            raise ConfigurationError(
                f"job {path.parent.name} has seen rows of persons who are forgotten: name the model of job {by}, which "
                "replaces it"
            )
        check_released(policy, path)

    policy = own_policy(options)
    versions, replaced = ModelVersions(policy.runs, may_be_used), replaced_jobs(policy)
    action, given = options.action, options.arguments
    if action == "list" and not given:
        unread: list[str] = []
        found, names = versions.found(unread), versions.names()
        options.tell(models=found, names=names, left_out=unread, replaced=replaced)
        print(describe(found, names, replaced))
        for text in unread:
            print(f"left out: {printable(text, 1000)}")
    elif action == "add" and len(given) == 2:
        name, job = given
        version = versions.add(name, job)
        options.tell(name=name, version=version)
        print(f"job {job} is {name}@{version}, which `veilboost predict {name}` uses from now on")
    elif action == "rollback" and len(given) == 2 and is_number(given[1]):
        name, version = given[0], int(given[1])
        before = versions.use(name, version)
        options.tell(name=name, version=version, before=before)
        print(f"`veilboost predict {name}` uses {name}@{version} from now on; before it was {name}@{before}")
    else:
        raise ConfigurationError("give nothing to list the models, or: add NAME JOB_ID, or: rollback NAME VERSION")
    return 0


@command(
    "list all runs of a site, compare them on a page, or remove old ones",
    option("--html", metavar="FILE.html", type=PATH, help="write a page that sorts, and shows runs side by side"),
    option("--prune", is_flag=True, help="say which runs the policy (its key retention) lets go, and remove nothing"),
    option("--yes", is_flag=True, help="with --prune: remove them"),
    option("--policy-changes", is_flag=True, help="show when the site's policy was another, and by whom, instead"),
    WORKSPACE,
    SITE,
    prints_json=True,
)
def runs(options: Options) -> int:
    """``veilboost runs``: all jobs that this site has taken part in, the newest first. Sends nothing.

    For each job its name, profile, data set, rounds, best score and the name of its model (`veilboost models`); with
    --json also parameters, metrics, seconds and bytes. The page of --html sorts by each column, and shows curves and
    parameters of chosen runs side by side; it needs no network, and is for this site's people alone (mode 0600).

    --prune removes folders of runs and nothing else: registry, ledgers and what they keep stay. Runs whose model has a
    name, runs that others were built on, and the newest of each kind on a data set stay, too.
    """
    from nvflare_plugins.cli.runs import run

    return run(options)


@command(
    "compare a file of new rows with those that a model was trained on",
    argument("model", metavar="NAME", help="name of a model (veilboost models), NAME@VERSION, or a job's id"),
    argument("data", metavar="NEW_FILE", type=PATH, help="the new rows, written as the training file is"),
    option("--out", metavar="FILE.html", type=PATH, help="write a page, and FILE.json beside it"),
    option("--threshold", type=float, default=0.25, help="stability index from which it is drift (default: 0.25)"),
    option("--training", metavar="FILE", type=PATH, help="the training rows (default: the data set as it is now)"),
    _IGNORE,
    WORKSPACE,
    SITE,
    *FILE_OPTIONS,
    exits={0: "below the threshold", 3: "drift: a column or score at or above it"},
)
def drift(options: Options) -> int:
    """``veilboost drift``: are new rows still like those that a model was trained on? Sends nothing.

    For each column the population stability index between the training rows and the new ones, on the model's own cuts
    (a category each, and one bin for missing values), missing rates, categories that the model does not know, and the
    index of the model's scores. Common reading: below 0.1 little has changed, from 0.25 on the model needs a look.
    Categories are shown by name where ten rows share them. The page and its JSON are for the site alone (mode 0600).

    """
    from nvflare_plugins.cli.drift import run

    return run(options)
