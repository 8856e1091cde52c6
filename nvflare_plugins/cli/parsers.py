"""All subcommands of ``veilboost`` with their options; nothing here takes long to import."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn, TypeAlias

from nvflare_plugins.data.declaration import ANSWERS, ENCODINGS
from nvflare_plugins.site.policy_values import PROFILES, Consents

# What subcommands say of themselves under ``--help``, where a line is not enough.


SITE_SETUP = """``veilboost site-setup DIR``: merge what a site needs to run VeilBoost jobs into its FLARE workspace.

Files in the folder ``local`` are touched, and one beside it, and nothing of a job:

* ``resources.json``: FLARE starts only components on the allow-list. It becomes the list of VeilBoost's own classes,
  each by its exact name, and what the site itself had added; FLARE's classes need ``--allow``. At a site, the streaming
  of its log files to the server is switched off: FLARE's default sends the error log, with the traces of libraries that
  may quote values, and any job may ask for the whole log. What the server should know of a failure, jobs of this
  package report by themselves.
* ``authorization.json``: custom code in jobs (byoc) and the console's shell commands (cat, ls, grep, head, tail, pwd)
  are denied to every role; all other rights stay.
* ``veilboost__p_resources.json``: starts a guard in FLARE's process, which holds to that whatever role the server
  names, and lets jobs bring their two files of JSON and FLARE's signatures, nothing else.
* ``veilboost__j_resources.json``: has jobs' processes look for settings in the site's own folders only.
* ``../comm_config.json``: a copy of the one here, or an empty one; FLARE takes the first that it finds.
* ``veilboost.json``: the site's policy, which no job can change. A new one is strict; an existing one changes only
  where an option says so.

Calling it again changes nothing more. Running jobs keep what they started with; FLARE reads rights and guard when it
starts. Jobs refuse to begin where any of this is missing.
"""

CHECK = """``veilboost check``: everything at once that a job would stumble over in a site's own table. Sends nothing.

It looks at a file, or at a data set of a site that is set up, as its policy reads it. It prints counts and the numbers
of rows, never a value of a row: of values it shows words that are known to mean "missing", and texts that at least ten
rows share. What it drafts is taken from the data; lists and bounds in a job are public, and those of a private job must
come from public knowledge.

Exit code: 0 fine (notes do not count), 1 problems, 2 wrong usage.
"""

REPORT = """``veilboost report``: rebuild report.html from run.json, the model and the evidence in a run's folder.

With --summary it writes one page about the run for a data-protection officer instead: purpose, controller, retention
and legal basis in the words of the site's policy (its key data_protection), what was done on which rows, what left the
site under which protection, who could learn what, consents, the privacy budget, and what the evidence shows. It prints
on paper. The page counts this site's rows, and is for its owner alone (mode 0600).
"""

COMPARE = """``veilboost compare``: what joining a horizontal job was worth to this site, as numbers. Sends nothing.

It trains XGBoost on the site's own training rows with the job's parameters, scores the site's own evaluation rows with
that model and with the job's, and writes both side by side, with an interval for the difference, into local.html in the
run's folder. No job asks for it or sees it: it is for the site alone (mode 0600).
"""

PREDICT = """``veilboost predict``: score a file of rows with a finished model, at one site. Sends nothing.

Columns go by name, in any order; classes are written under the names that the job declared. Nothing is written unless
everything fits, and what is written is for its owner alone (mode 0600).
"""

MODELS = """``veilboost models``: the models that a site has from its jobs, and which of them is in use.

Without more it lists them: when the job ended, the model's name and version, the data set it was trained on, rounds,
the hash of its bytes, metrics of the last round. `add NAME JOB_ID` makes a job's model the next version of NAME and
puts it in use; `rollback NAME VERSION` puts another version in use. `veilboost predict NAME FILE` takes the version in
use, `NAME@2` that version. Nothing is copied or deleted, and the change is there whole or not at all.
"""

DRIFT = """``veilboost drift``: are new rows still like those that a model was trained on? Sends nothing.

For each column the population stability index between the training rows and the new ones, on the model's own cuts (a
category each, and one bin for missing values), missing rates, categories that the model does not know, and the index of
the model's scores. Common reading: below 0.1 little has changed, from 0.25 on the model needs a look. Categories are
shown by name where ten rows share them. The page and its JSON are for the site alone (mode 0600).

Exit code: 0 below the threshold, 3 drift (a column or score at or above it), 1 refused, 2 wrong usage.
"""

SNAPSHOT = """``veilboost snapshot NAME``: rows of a site's database into a dated Parquet file, for jobs to read.

Address, query and folder stand in the site's policy (``snapshots.NAME``), where no job can change them; the password
comes from an environment variable or a file of mode 0600, and appears nowhere. The query runs in a transaction that
only reads, where the database has such, and is rolled back. Types are kept: whole numbers, fractions, decimals, dates,
text; NULL is missing. The file is written whole or not at all, for its owner alone (0600), under the name
NAME-20261122T201500Z.parquet.

A data set whose path is the folder reads the snapshot with the latest time in its name. Whoever wants to read an older
one, or two months beside each other, names the file itself. It needs the extra ``snapshot`` and the driver of the
database.
"""

SCORE = """``veilboost score JOB_ID ROW ...``: ask a vertical job that stays (action `serve`) for scores.

It runs at the party that has the label, as the user that runs FLARE there, and speaks to the job over a Unix socket in
the run's folder. Rows are positions in the alignment in use, or with --ids this site's own ids; write them right after
the job. Without rows it reads requests from standard input, one JSON object a line: {"rows": [0, 17]}, {"ids": ["a"]},
{"status": true}, {"refresh": "JOB_ID"} or {"stop": true}. For each it prints one line of JSON: {"scores": [...]} with
row, class and probability (a regression: prediction), or {"error": text}.

--refresh takes the rows of a newer alignment (of a job of kind alignment, say) at all parties, or at none. --stop ends
the job, whose reports and evidence are then written as after any job.

Exit code: 0 all answered, 1 an error among the answers or no job there, 2 wrong usage.
"""

DOSSIER = """``veilboost dossier JOB``: all that this site can show of one job, in one signed archive. Sends nothing.

A cover page, the evidence and what `verify` says of it, the policy at the time, the privacy ledger of the job's data
sets, who could learn what, attacks on this very model, hashes of the model, a software bill of materials, the page for
data protection, the report and the run's record. What is missing is named on the cover page, with the reason.

The attacks (membership inference, reconstruction) are run here, on the site's own rows, beside rows that the model was
not trained on; the archive gets figures over all rows. The list of all files is signed with the key of the site's FLARE
certificate; `veilboost verify FILE.zip` checks it. The archive counts this site's rows and is for its owner alone
(mode 0600) until he gives it away.
"""


# All subcommands of ``veilboost`` with their options.
#
# What a subcommand does is imported once it is called for: XGBoost, FLARE and pandas take seconds, and help or a word
# about wrong usage needs none of them. So this module must import neither, and writes out the few choices that lie
# beside them.


ROOT_CERTIFICATE = "rootCA.pem"
FLARE_EXTRAS = ("monitoring", "mlflow", "flare", "none")
HORIZONTAL_PROFILES = ("plain", "masks", "bfv", "ckks")
VERTICAL_PROFILES = ("paillier", "elgamal")  # that can be planned
CUT_MODES = ("quantile", "exact", "uniform", "logarithmic")

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command and of all its subcommands; what it returns has a function ``func``."""
    parser = argparse.ArgumentParser(
        prog="veilboost", description="Private federated XGBoost for NVIDIA FLARE, on the stock XGBoost wheel."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and leave")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add in (_demo, _site_setup, _check, _plan, _verify, _report, _compare, _predict):
        add(subparsers)
    for add in (_export, _score, _snapshot, _models, _drift, _dossier, _registry, _ledger):
        add(subparsers)
    return parser


class _Version(argparse.Action):
    """Looks the version up when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"veilboost {version('veilboost')}")
        parser.exit()


def _command(
    subparsers: Subparsers, name: str, words: str, description: str | None = None, *, module: str = ""
) -> argparse.ArgumentParser:
    """Add a subcommand, and return its parser.

    Args:
        words: for the list of subcommands.
        description: printed as it stands.
        module: whose ``run`` it calls, below ``nvflare_plugins.cli``; the subcommand's own name where none is given.
    """
    parser = subparsers.add_parser(name, help=words, description=description)
    if description is not None:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(func=partial(_run, module or name.replace("-", "_")))
    return parser


def _run(module: str, options: argparse.Namespace) -> int:
    code: int = import_module(f"nvflare_plugins.cli.{module}").run(options)
    return code


def _demo(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "demo", "run the main job on one machine beside centralized XGBoost")
    parser.add_argument("--data", type=Path, help="CSV or Parquet file; default: scikit-learn's breast cancer set")
    parser.add_argument("--label", help="label column of the file")
    parser.add_argument("--profile", choices=HORIZONTAL_PROFILES, default="masks")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for the demo's runs (default: runs)")


def _site_setup(subparsers: Subparsers) -> None:
    parser = _command(
        subparsers,
        "site-setup",
        "prepare a simulator workspace, a POC workspace or a site's startup kit for VeilBoost jobs",
        SITE_SETUP,
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    _data_set_options(parser)
    _policy_options(parser)
    parser.add_argument(
        "--check", action="store_true", help="change nothing, say what is missing; exit code 1 if anything is"
    )
    parser.add_argument(
        "--upgrade",
        action="store_true",
        help="after an update of VeilBoost: complete what an earlier version has set up, and list what the policy "
        "could say since; nothing of that is switched on",
    )
    parser.add_argument(
        "--example",
        action="store_true",
        help="write data that are nobody's, and policies that consent to all that the job folders under jobs ask for, "
        "so that each runs as it stands; in an empty workspace, for trying out",
    )


def _data_set_options(parser: argparse.ArgumentParser) -> None:
    """Add what says where a site's data sets lie, how they are read, and what private jobs may spend on them."""
    parser.add_argument(
        "--data-set",
        dest="data_sets",
        metavar="NAME=PATH",
        type=_data_set,
        action="append",
        default=[],
        help="register a data set under the name that jobs use; {site} in the path becomes the site's name",
    )
    parser.add_argument(
        "--id",
        dest="ids",
        metavar="NAME=COLUMN",
        type=_named,
        action="append",
        default=[],
        help="the column of a data set that names its rows, for alignment with other parties",
    )
    for key, (metavar, words) in _SNAPSHOT_OPTIONS.items():
        option = "--snapshot" if key == "url" else f"--snapshot-{key.replace('_', '-')}"
        parser.add_argument(
            option, dest=f"snapshot_{key}", metavar=metavar, type=_named, action="append", default=[], help=words
        )
    for option, (key, metavar, kind, words) in _READER_OPTIONS.items():
        parser.add_argument(
            option, dest=f"reader_{key}", metavar=metavar, type=kind, action="append", default=[], help=words
        )
    parser.add_argument(
        "--budget",
        dest="budgets",
        metavar="NAME=EPSILON,DELTA[,pure_epsilon=EPSILON][,rows_per_person=ROWS][,own_persons=true]",
        type=_budget,
        action="append",
        default=[],
        help="what all differentially private jobs together may spend on a data set, without which they are refused; "
        "how much of epsilon is kept for pure mechanisms (DPBoost), the most rows of one person, and whether nobody "
        "is in another such data set",
    )


def _policy_options(parser: argparse.ArgumentParser) -> None:
    """Add what the site's policy allows, consents to and keeps."""
    parser.add_argument(
        "--profile",
        dest="profiles",
        choices=PROFILES,
        action="append",
        default=[],
        help="allow exactly these profiles (repeat the option)",
    )
    parser.add_argument(
        "--add-profile",
        dest="added_profiles",
        choices=PROFILES,
        action="append",
        default=[],
        help="allow a profile beside those that the policy allows, such as elgamal",
    )
    parser.add_argument(
        "--consent",
        dest="consents",
        type=_consent,
        metavar="NAME",
        action="append",
        default=[],
        help="agree to something that discloses more than the default: "
        f"{', '.join(Consents.__dataclass_fields__)}; tuning with a number, such as tuning=5000",
    )
    parser.add_argument(
        "--data-protection",
        dest="statement",
        metavar="KEY=TEXT",
        type=_named,
        action="append",
        default=[],
        help="what the page for a data-protection officer says in the site's own words: controller, contact, purpose, "
        "legal_basis or retention",
    )
    parser.add_argument("--min-sites", type=int, help="fewest data-bearing sites of a job")
    parser.add_argument("--max-colluders", type=int, help="how many other sites might pool what they see")
    parser.add_argument(
        "--keep-in",
        metavar="DIR",
        type=_folder,
        help="keep runs, registry and ledgers below this folder, outside FLARE's workspace",
    )
    parser.add_argument(
        "--allow",
        dest="allow",
        choices=FLARE_EXTRAS,
        action="append",
        default=[],
        help="let jobs start more of FLARE than VeilBoost needs: its monitoring (event counts and times), its MLflow "
        "receiver (the job names the address that the server writes to), or `flare`, its whole list: for sites that "
        "run other jobs too, and whose data those jobs then read and send without VeilBoost's policy; `none` "
        "takes it back",
    )


_SNAPSHOT_OPTIONS = {
    "url": ("NAME=URL", "a database in SQLAlchemy's form, without a password, for `veilboost snapshot NAME`"),
    "query": ("NAME=SELECT", "the query whose rows a snapshot holds"),
    "folder": ("NAME=DIR", "where its files go; a data set with this folder as its path reads the newest"),
    "password_env": ("NAME=VARIABLE", "the environment variable with the password"),
    "password_file": ("NAME=FILE", "the file with the password, of mode 0600"),
}
"""Keys of the policy's snapshot -> (what to give, help)."""


def _named(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise argparse.ArgumentTypeError("give NAME=VALUE")
    return name, value


_BUDGET_VALUES: dict[str, Callable[[str], float]] = {
    "pure_epsilon": float,
    "rows_per_person": int,
    "own_persons": {"true": True, "false": False}.__getitem__,
}


def _folder(text: str) -> str:
    """Return a folder's absolute path; an empty text, as of a variable that is not set, is none."""
    if not text.strip():
        raise argparse.ArgumentTypeError("name a folder; the text is empty")
    return str(Path(text).expanduser().absolute())


def _consent(text: str) -> str:
    name, separator, number = text.partition("=")
    known = {one.name: one.default for one in dataclasses.fields(Consents)}
    if name not in known:
        raise argparse.ArgumentTypeError(f"choose one of {', '.join(known)}")
    has_number = not isinstance(known[name], bool)
    if has_number != bool(separator) or (has_number and not number.isdecimal()):
        raise argparse.ArgumentTypeError(f"give {name}=NUMBER" if has_number else f"give {name} without a value")
    return text


def _budget(text: str) -> tuple[str, dict[str, float]]:
    name, value = _named(text)
    try:
        epsilon, delta, *further = value.split(",")
        budget = {"epsilon": float(epsilon), "delta": float(delta)}
        for part in further:
            key, _, number = part.partition("=")
            if key in budget or key not in _BUDGET_VALUES:
                raise ValueError(key)
            budget[key] = _BUDGET_VALUES[key](number)
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(
            "give NAME=EPSILON,DELTA[,pure_epsilon=EPSILON][,rows_per_person=ROWS][,own_persons=true], for example "
            "credit=2,1e-6 or credit=2,1e-6,pure_epsilon=0.5,rows_per_person=3"
        ) from None
    return name, budget


def _bare_budget(text: str) -> dict[str, float]:
    try:
        return _budget(f"budget={text}")[1]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            "give EPSILON,DELTA[,pure_epsilon=EPSILON][,rows_per_person=ROWS], for example 2,1e-6"
        ) from None


def _data_set(text: str) -> tuple[str, str]:
    name, path = _named(text)
    return name, str(Path(path).expanduser().absolute())


def _of_column(text: str) -> tuple[str, dict[str, str]]:
    name, value = _named(text)
    column, separator, what = value.rpartition("=")
    if not separator or not what:
        raise argparse.ArgumentTypeError("give NAME=COLUMN=VALUE")
    return name, {column: what}


def _one_character(text: str) -> tuple[str, str]:
    """Return a character, which may be written as JSON escapes it: terminals show no tab."""
    name, value = _named(text)
    if value.startswith("\\") and len(value) > 1:
        try:
            value = json.loads(f'"{value}"')
        except ValueError:
            raise argparse.ArgumentTypeError(r"give NAME=CHARACTER, a tab as \t") from None
    return name, value


def _answer(text: str) -> tuple[str, dict[str, object]]:
    name, value = _named(text)
    place = value.find("={") if value.endswith("}") else value.rfind("=")
    column, answer = value[:place], value[place + 1 :]
    if place < 0 or not answer:
        raise argparse.ArgumentTypeError("give NAME=COLUMN=ANSWER")
    try:
        return name, {column: json.loads(answer) if answer.startswith("{") else answer}
    except ValueError:
        raise argparse.ArgumentTypeError('give numbers of texts as JSON: NAME=COLUMN={"TEXT": NUMBER}') from None


def _list_of(text: str) -> tuple[str, list[str]]:
    name, value = _named(text)
    return name, [value]


_READER_OPTIONS: dict[str, tuple[str, str, Callable[[str], tuple[str, object]], str]] = {
    "--encoding": ("encoding", "NAME=ENCODING", _named, f"of a CSV file: {', '.join(ENCODINGS)}"),
    "--format": ("format", "NAME=FORMAT", _named, "csv or parquet, where it does not follow from the file's suffix"),
    "--separator": ("separator", "NAME=CHARACTER", _one_character, r"between the columns of a CSV file; a tab is \t"),
    "--decimal": (
        "decimal",
        "NAME=CHARACTER",
        _named,
        "between whole part and fraction of numbers that are text: . or ,",
    ),
    "--thousands": ("thousands", "NAME=CHARACTER", _one_character, "between groups of three digits of such numbers"),
    "--missing": ("missing", "NAME=TEXT", _list_of, "a text that means missing, besides those of the policy"),
    "--date": (
        "dates",
        "NAME=COLUMN=PATTERN",
        _of_column,
        "a column of dates, as in credit=opened=DD.MM.YYYY, or `DD.MM.YY from 1930` for 1930 to 2029",
    ),
    "--column": (
        "columns",
        "NAME=COLUMN=ANSWER",
        _answer,
        f"what a column is: {', '.join(ANSWERS)}, or a number for each text, as JSON",
    ),
    "--rename": ("rename", "NAME=COLUMN=NEW", _of_column, "another name for a column"),
    "--memory": ("memory", "NAME=HOW", _named, "how many rows are held at once: whole, passes or external (Parquet)"),
    "--drop-unlabelled": (
        "drop_unlabelled",
        "NAME",
        lambda name: (name, True),
        "horizontal jobs leave out rows without a label",
    ),
}
"""Options -> (key of the policy's data set, what to give, how it is read, help)."""


def _check(subparsers: Subparsers) -> None:
    parser = _command(
        subparsers,
        "check",
        "find all problems of a table at once, and draft what a job and the policy could say",
        CHECK,
    )
    parser.add_argument(
        "where", type=Path, metavar="FILE_OR_DIR", help="a table, or the workspace of a site that is set up"
    )
    parser.add_argument("--site", help="the site's name; with a workspace")
    parser.add_argument("--data-set", metavar="NAME", help="a data set of the site's policy (else those of the job)")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--job", type=Path, metavar="JOB_FOLDER", help="check for this job: its label, features, lists")
    asked.add_argument("--label", metavar="COLUMN", help="check for training with this label")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _plan(subparsers: Subparsers) -> None:
    parser = _command(
        subparsers, "plan", "estimate time, bytes, memory and leakage before a run", module="plan.command"
    )
    parser.description = (
        "Estimate a training from its shape, or from a job folder plus rows and features. With "
        "--foreign-features it is a vertical training. For a private job it says what is spent, how much noise that "
        "means and what one person is promised."
    )
    parser.add_argument(
        "job", nargs="?", type=Path, metavar="JOB_FOLDER", help="take the training's shape from this job"
    )
    _shape_options(parser)
    parser.add_argument("--latency-ms", type=float, default=10.0, help="one empty rendezvous of all sites (default 10)")
    parser.add_argument("--bandwidth-mbit", type=float, default=100.0, help="link of each site (default 100)")
    parser.add_argument("--server-bandwidth-mbit", type=float, help="link of the server (default: as a site's)")
    _private_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _shape_options(parser: argparse.ArgumentParser) -> None:
    """Add what says how large a training is, and under which profile."""
    parser.add_argument(
        "--rows", type=int, help="training rows of all sites together; for private jobs only if that number is public"
    )
    parser.add_argument(
        "--features",
        type=int,
        help="columns; in vertical training the active party's, in a FederBoost job a passive party's",
    )
    parser.add_argument(
        "--foreign-features",
        type=int,
        nargs="+",
        help="vertical training: columns of each passive party, in order of their names",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="vertical training: also with 1, 2, 4, ... up to N workers at each party (jobs/CLUSTER.md)",
    )
    parser.add_argument("--key-bits", type=int, help="vertical training: key length (default 3072, or the job's)")
    parser.add_argument("--sites", type=int, default=3)
    for name, default in (("bins", 256), ("depth", 6), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=None, help=f"default {default}, or the job's")
    parser.add_argument("--outputs", type=int, default=None, help="classes of a multiclass objective")
    parser.add_argument("--max-leaves", type=int, default=None, help="leaves per tree, for lossguide")
    parser.add_argument(
        "--metrics", type=int, default=None, help="evaluation metrics times evaluation sets (default 1)"
    )
    parser.add_argument("--cuts", choices=CUT_MODES, default=None)
    parser.add_argument("--missing", action="store_true", help="every feature has missing values somewhere")
    parser.add_argument(
        "--profile",
        choices=["all", *HORIZONTAL_PROFILES, *VERTICAL_PROFILES],
        default="all",
        help="horizontal training: one, or all beside each other; vertical: paillier (or the job's) or elgamal",
    )


def _private_options(parser: argparse.ArgumentParser) -> None:
    """Add what a plan of a private job is asked beside its shape."""
    budget = parser.add_argument_group("private jobs: how many more trainings a budget bears")
    budget.add_argument(
        "--budget",
        type=_bare_budget,
        metavar="EPSILON,DELTA[,pure_epsilon=EPSILON][,rows_per_person=ROWS]",
        help="of a whole budget, as site-setup takes it",
    )
    budget.add_argument(
        "--workspace", type=Path, metavar="DIR", help="of what is left of a site's budget: its workspace"
    )
    budget.add_argument("--site", metavar="NAME", help="the site's name; with a workspace")
    parser.add_argument(
        "--base-rate",
        type=float,
        metavar="P",
        help="private trees: share of one of the two classes, where it is public (default 0.5)",
    )


def _verify(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "verify", "check the evidence of a job")
    parser.description = (
        "Check the evidence of a job: chains, signatures, agreement of sites and server, protection of "
        "every private message. Exit code 0: VERIFIED; 1: it does not hold; 2: UNSIGNED, the records agree but anyone "
        "could have written them (or wrong usage); 3: SIGNED, but root or server names were not given; 4: no such "
        "path, or no evidence at it; 5: the root certificate is not there, or cannot be used; 6: EMPTY, it shows no "
        "private message and no round. A dossier (.zip) is checked with the evidence in it."
    )
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="folder or files of exported evidence, or one dossier"
    )
    parser.add_argument(
        "--root-ca",
        type=Path,
        metavar="FILE",
        help=f"the project's {ROOT_CERTIFICATE} from your own startup kit, never from the evidence; evidence that is "
        "not signed then fails",
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME",
        help="name of the project's server, whose certificate is not a site's (default: from the kit of --root-ca)",
    )
    parser.add_argument("--job", metavar="ID", help="the job that must be shown (needed where there are several)")
    parser.add_argument(
        "--at",
        type=_moment,
        metavar="TIME",
        help="when the job began, as YYYY-MM-DD or with THH:MM in UTC; certificates are judged at that time, give or "
        "take a day (default: by the clocks of those who signed)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if "T" not in text:
        moment += timedelta(hours=12)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def _report(subparsers: Subparsers) -> None:
    parser = _command(
        subparsers,
        "report",
        "rebuild the HTML report of a run, or make a page of it for a data-protection officer",
        REPORT,
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN_DIR", help="folder of a run at a site")
    parser.add_argument(
        "-o", "--output", "--out", metavar="FILE", type=Path, help="where to write (default: report.html in RUN_DIR)"
    )
    parser.add_argument("--summary", action="store_true", help="the page for a data-protection officer; needs --out")
    parser.add_argument(
        "--evidence",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="with --summary: exported evidence of all parties, to be verified for this page",
    )
    parser.add_argument(
        "--root-ca", type=Path, metavar="FILE", help=f"with --evidence: the {ROOT_CERTIFICATE} of your own startup kit"
    )


def _compare(subparsers: Subparsers) -> None:
    parser = _command(
        subparsers,
        "compare",
        "compare the model of a horizontal job with one of this site's own rows",
        COMPARE,
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN_DIR", help="folder of a run at a site")
    parser.add_argument(
        "--workspace", metavar="DIR", type=Path, help="the site's workspace (default: where RUN_DIR lies)"
    )
    parser.add_argument(
        "--data-set", metavar="NAME", help="rows to compare on, a data set of the policy (default: the job's own)"
    )


def _predict(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "predict", "score a file with a finished model", PREDICT)
    parser.add_argument(
        "model",
        type=Path,
        help="model.json of a run, merged_model.json, or the name of a model (veilboost models), NAME or NAME@VERSION",
    )
    parser.add_argument("data", type=Path, help="rows to score: CSV (also .csv.gz) or Parquet, also a folder of files")
    parser.add_argument("--out", type=Path, required=True, help="file to write: .csv or .parquet")
    parser.add_argument("--explain", action="store_true", help="SHAP values too, and a picture beside the file (.svg)")
    parser.add_argument(
        "--threshold", type=float, help="probability above which a row is of the second of two classes (default: 0.5)"
    )
    parser.add_argument("--id", metavar="COLUMN", help="column that names the rows, kept in the file that is written")
    parser.add_argument("--ignore", metavar="COLUMN", action="append", default=[], help="column that is no feature")
    parser.add_argument("--unknown-is-missing", action="store_true", help="categories in no list count as missing")
    parser.add_argument(
        "--rounds", choices=["all", "best"], default="all", help="best: up to the best round of early stopping"
    )
    reading = parser.add_argument_group("how the file is read")
    reading.add_argument("--missing", metavar="TEXT", action="append", default=[], help="one more text for missing")
    reading.add_argument("--separator", help="between the columns of a CSV file (default: a comma)")
    reading.add_argument("--encoding", choices=ENCODINGS, help="of a CSV file (default: utf-8)")
    reading.add_argument(
        "--workspace", metavar="DIR", type=Path, help="read it as a data set of the site in this workspace is read"
    )
    reading.add_argument("--site", metavar="NAME", help="the site's name; with a workspace")
    reading.add_argument("--data-set", metavar="NAME", help="the data set of the site's policy; with a workspace")


def _export(subparsers: Subparsers) -> None:
    parser = _command(
        subparsers, "export", "write a copy of a model that may leave the site: XGBoost's JSON, ONNX, or treelite"
    )
    parser.add_argument("model", type=Path, help="model.json of a run")
    parser.add_argument(
        "output", type=Path, help="file to write: .onnx, .treelite, or any other name for XGBoost's own JSON"
    )


def _models(subparsers: Subparsers) -> None:
    parser = _command(
        subparsers,
        "models",
        "list the models that a site has from its jobs, name them, go back to an earlier version",
        MODELS,
    )
    parser.add_argument("action", nargs="?", choices=("list", "add", "rollback"), default="list")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="add: NAME JOB_ID; rollback: NAME VERSION")
    _add_site(parser)


def _drift(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "drift", "compare a file of new rows with those that a model was trained on", DRIFT)
    parser.add_argument("model", metavar="NAME", help="name of a model (veilboost models), NAME@VERSION, or a job's id")
    parser.add_argument("data", type=Path, metavar="NEW_FILE", help="the new rows, written as the training file is")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write a page, and FILE.json beside it")
    parser.add_argument(
        "--threshold", type=float, default=0.25, help="stability index from which it is drift (default: 0.25)"
    )
    parser.add_argument(
        "--training", type=Path, metavar="FILE", help="the training rows (default: the data set as it is now)"
    )
    parser.add_argument("--ignore", metavar="COLUMN", action="append", default=[], help="column that is no feature")
    _add_site(parser)


def _snapshot(subparsers: Subparsers) -> None:
    parser = _command(
        subparsers,
        "snapshot",
        "write the rows of a query to a database into a dated file that jobs read; without a name, list them",
        SNAPSHOT,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a snapshot of the site's policy")
    parser.add_argument("--keep", type=int, metavar="N", help="remove all but the N newest afterwards")
    _add_site(parser)


def _score(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "score", "ask a job that stays (action serve) for scores of rows", SCORE)
    parser.add_argument("job", metavar="JOB_ID", help="the job that stays")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="positions in the alignment; none reads standard input")
    parser.add_argument("--ids", action="store_true", help="the rows are ids of this site")
    parser.add_argument("--status", action="store_true", help="say what was answered so far, and how fast")
    parser.add_argument("--refresh", metavar="JOB_ID", help="take the rows of that alignment, at all parties")
    parser.add_argument("--stop", action="store_true", help="end the job at all parties")
    parser.add_argument("--workspace", metavar="DIR", type=Path, help="the site's workspace")
    parser.add_argument("--site", metavar="NAME", help="the site's name")
    parser.add_argument("--socket", metavar="PATH", help="the job's socket, in place of --workspace and --site")


def _dossier(subparsers: Subparsers) -> None:
    parser = _command(
        subparsers, "dossier", "put all that this site can show of a job into one signed archive", DOSSIER
    )
    parser.add_argument("job", metavar="JOB", help="folder of a run at a site, or a job's id (with a workspace)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.zip", help="archive to write")
    parser.add_argument("--workspace", metavar="DIR", type=Path, help="the site's workspace (default: where JOB lies)")
    parser.add_argument("--site", metavar="NAME", help="the site's name; with a job's id")
    parser.add_argument(
        "--evidence",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="exported evidence of all parties, which is verified and goes into the archive",
    )
    parser.add_argument(
        "--root-ca", type=Path, metavar="FILE", help="with --evidence: the rootCA.pem of your own startup kit"
    )
    parser.add_argument(
        "--held-out",
        metavar="NAME",
        help="data set of the policy with rows that the model was not trained on (default: the job's evaluation set)",
    )
    parser.add_argument("--no-attacks", action="store_true", help="run no attacks, which the archive then says")


def _add_site(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workspace", metavar="DIR", type=Path, required=True, help="the site's workspace")
    parser.add_argument("--site", metavar="NAME", required=True, help="the site's name")


def _registry(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "registry", "list the runs and searches that a site remembers")
    parser.add_argument(
        "workspace", type=Path, help="the site's workspace, or the folder in which it lies under the site's name"
    )
    parser.add_argument("--site", required=True, help="the site's name")
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--reset-refusals",
        metavar="DATA_SET",
        help="let jobs look at the rows of a data set again, after too many were refused because of them",
    )
    action.add_argument(
        "--backup",
        metavar="FILE",
        type=Path,
        help="copy what the site remembers to a new file, while jobs go on, and check the copy",
    )


def _ledger(subparsers: Subparsers) -> None:
    parser = _command(subparsers, "ledger", "show what a site has spent of its privacy budgets")
    parser.add_argument(
        "workspace", type=Path, help="the site's workspace, or the folder in which it lies under the site's name"
    )
    parser.add_argument("--site", required=True, help="the site's name")
    parser.add_argument("--data-set", help="only this data set")
    parser.add_argument(
        "--html", metavar="FILE.html", type=Path, help="write a page with spending over time instead, fit for paper"
    )
    parser.add_argument(
        "--close", metavar="JOB", help="end a job that will not go on, so that what it has not used is free again"
    )
    parser.add_argument(
        "--accept-cut",
        action="store_true",
        help="go on with a ledger whose last records, or whose head, are lost and cannot be restored: all that may be "
        "missing is charged, the whole budget where the head is lost too",
    )
