"""Commands for a site: set it up, look at its table, take a snapshot, show what it remembers and has spent."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.declared import OneOf
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.base.formatting import counted
from nvflare_plugins.cli.options import (
    FILE_OPTIONS,
    PATH,
    SITE,
    WORKSPACE,
    Options,
    argument,
    check_output,
    column_names,
    command,
    option,
    own_policy,
)
from nvflare_plugins.data.declaration import ANSWERS, DataSet, IdForm, SnapshotSource, snapshots_in
from nvflare_plugins.site.policy_values import Consents
from nvflare_plugins.site.profiles import PROFILES

# Written out, because importing what they come from takes long.
FLARE_EXTRAS = ("monitoring", "mlflow", "flare", "none")

_BUDGET_VALUES: dict[str, Callable[[str], float]] = {
    "pure_epsilon": float,
    "rows_per_person": int,
    "own_persons": {"true": True, "false": False}.__getitem__,
}


# -- how values of site-setup's options are written -------------------------------------------------------------------


def named(text: str) -> tuple[str, str]:
    """Return the two parts of NAME=VALUE."""
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise click.BadParameter("give NAME=VALUE")
    return name, value


def _folder(text: str) -> str:
    """Return a folder's absolute path; an empty text, as of a variable that is not set, is none."""
    if not text.strip():
        raise click.BadParameter("name a folder; the text is empty")
    return str(Path(text).expanduser().absolute())


def _consent(text: str) -> str:
    name, separator, number = text.partition("=")
    known = {one.name: one.default for one in dataclasses.fields(Consents)}
    if name not in known:
        raise click.BadParameter(f"choose one of {', '.join(known)}")
    has_number = not isinstance(known[name], bool)
    if has_number != bool(separator) or (has_number and not number.isdecimal()):
        raise click.BadParameter(f"give {name}=NUMBER" if has_number else f"give {name} without a value")
    return text


def budget(text: str) -> dict[str, float]:
    """Return a privacy budget, by the policy's keys."""
    try:
        epsilon, delta, *further = text.split(",")
        values = {"epsilon": float(epsilon), "delta": float(delta)}
        for part in further:
            key, _, number = part.partition("=")
            if key in values or key not in _BUDGET_VALUES:
                raise ValueError(key)
            values[key] = _BUDGET_VALUES[key](number)
    except (KeyError, ValueError):
        raise click.BadParameter(
            "give EPSILON,DELTA[,pure_epsilon=EPSILON][,rows_per_person=ROWS], for example 2,1e-6"
        ) from None
    return values


def _named_budget(text: str) -> tuple[str, dict[str, float]]:
    name, value = named(text)
    try:
        return name, budget(value)
    except click.BadParameter:
        raise click.BadParameter(
            "give NAME=EPSILON,DELTA[,pure_epsilon=EPSILON][,rows_per_person=ROWS][,own_persons=true], for example "
            "credit=2,1e-6 or credit=2,1e-6,pure_epsilon=0.5,rows_per_person=3"
        ) from None


def _data_set(text: str) -> tuple[str, str]:
    name, path = named(text)
    return name, str(Path(path).expanduser().absolute())


def _of_column(text: str) -> tuple[str, dict[str, str]]:
    name, value = named(text)
    column, separator, what = value.rpartition("=")
    if not separator or not what:
        raise click.BadParameter("give NAME=COLUMN=VALUE")
    return name, {column: what}


def _one_character(text: str) -> tuple[str, str]:
    """Return a character, which may be written as JSON escapes it: terminals show no tab."""
    name, value = named(text)
    if value.startswith("\\") and len(value) > 1:
        try:
            value = json.loads(f'"{value}"')
        except ValueError:
            raise click.BadParameter(r"give NAME=CHARACTER, a tab as \t") from None
    return name, value


def _answer(text: str) -> tuple[str, dict[str, object]]:
    name, value = named(text)
    place = value.find("={") if value.endswith("}") else value.rfind("=")
    column, answer = value[:place], value[place + 1 :]
    if place < 0 or not answer:
        raise click.BadParameter("give NAME=COLUMN=ANSWER")
    try:
        return name, {column: json.loads(answer) if answer.startswith("{") else answer}
    except ValueError:
        raise click.BadParameter('give numbers of texts as JSON: NAME=COLUMN={"TEXT": NUMBER}') from None


def _list_of(text: str) -> tuple[str, list[str]]:
    name, value = named(text)
    return name, [value]


def _named_columns(text: str) -> tuple[str, list[str]]:
    name, value = named(text)
    return name, column_names(value)


def _id_form(text: str) -> tuple[str, dict[str, object]]:
    name, value = named(text)
    steps: dict[str, object] = {}
    for part in value.split(","):
        key, has_text, of = part.partition("=")
        if key not in IdForm.__dataclass_fields__ or (key == "prefix") != bool(has_text):
            raise click.BadParameter("give NAME=STEP[,STEP...], each nfkc, ignore_case, prefix=TEXT or ignore_padding")
        steps[key] = of if has_text else True
    return name, steps


# -- site-setup -------------------------------------------------------------------------------------------------------


def _repeated(names: str, metavar: str, words: str, read: Callable[[str], Any] = named) -> click.Option:
    """Return an option that may be repeated. Args: names: the option, and what it is called among the options."""
    return option(*names.split(), metavar=metavar, type=read, multiple=True, help=words)


_Written = tuple[str, str, Callable[[str], Any]]
_SNAPSHOTS: dict[str, _Written] = {
    "url": ("--snapshot", "URL", named),
    "query": ("--snapshot-query", "SELECT", named),
    "folder": ("--snapshot-folder", "DIR", named),
    "password_env": ("--snapshot-password-env", "VARIABLE", named),
    "password_file": ("--snapshot-password-file", "FILE", named),
}
READERS: dict[str, _Written] = {
    "id_form": ("--id-form", "nfkc,ignore_case,prefix=TEXT,ignore_padding", _id_form),
    "names": ("--names", "COLUMN,COLUMN...", _named_columns),
    "encoding": ("--encoding", "ENCODING", named),
    "format": ("--format", "FORMAT", named),
    "separator": ("--separator", r"CHARACTER|\t", _one_character),
    "decimal": ("--decimal", "CHARACTER", named),
    "thousands": ("--thousands", "CHARACTER", _one_character),
    "missing": ("--missing", "TEXT", _list_of),
    "dates": ("--date", "COLUMN=PATTERN", _of_column),
    "columns": ("--column", f"COLUMN={'|'.join(ANSWERS)}|JSON", _answer),
    "rename": ("--rename", "COLUMN=NEW", _of_column),
    "memory": ("--memory", "whole|passes|external", named),
    "drop_unlabelled": ("--drop-unlabelled", "", lambda name: (name, True)),
}
"""Key of the policy -> the option that says it, how its value is written, and what reads that."""


def _options_of(document: type[Any], start: str, options: Mapping[str, _Written]) -> Iterator[click.Option]:
    """Yield options for keys of the policy, in these keys' own words."""
    for key, (name, value, read) in options.items():
        field = document.__pydantic_fields__[key]
        words = " ".join(str(field.description).split()).partition(". ")[0].removesuffix(".")
        listed = [one for choices in field.metadata if isinstance(choices, OneOf) for one in choices.values]
        words += f": {', '.join(map(repr, listed))}" if listed else ""
        yield _repeated(f"{name} {start}{key}", f"NAME={value}" if value else "NAME", words, read)


_DATA_SET_OPTIONS = (
    _repeated(
        "--data-set data_sets",
        "NAME=PATH",
        "register a data set under the name that jobs use; {site} in the path becomes the site's name",
        _data_set,
    ),
    _repeated(
        "--id ids", "NAME=COLUMN", "the column of a data set that names its rows, for alignment with other parties"
    ),
    *_options_of(SnapshotSource, "snapshot_", _SNAPSHOTS),
    *_options_of(DataSet, "reader_", READERS),
    _repeated(
        "--budget budgets",
        "NAME=EPSILON,DELTA[,pure_epsilon=EPSILON][,rows_per_person=ROWS][,own_persons=true]",
        "what all differentially private jobs together may spend on a data set, without which they are refused; "
        "how much of epsilon is kept for pure mechanisms (method pure, DPBoost), the most rows of one person, and "
        "whether nobody is in another such data set",
        _named_budget,
    ),
)
"""Where a site's data sets lie, how they are read, and what private jobs may spend on them."""

_POLICY_OPTIONS = (
    option(
        "--profile",
        "profiles",
        type=click.Choice(PROFILES),
        multiple=True,
        help="allow exactly these profiles (repeat the option)",
    ),
    option(
        "--add-profile",
        "added_profiles",
        type=click.Choice(PROFILES),
        multiple=True,
        help="allow a profile beside those that the policy allows, such as elgamal",
    ),
    _repeated(
        "--consent consents",
        "NAME",
        "agree to something that discloses more than the default: "
        f"{', '.join(Consents.__dataclass_fields__)}; tuning with a number, such as tuning=5000",
        _consent,
    ),
    _repeated(
        "--data-protection statement",
        "KEY=TEXT",
        "what the page for a data-protection officer says in the site's own words: controller, contact, purpose, "
        "legal_basis or retention",
    ),
    option("--min-sites", type=int, help="fewest data-bearing sites of a job"),
    option("--max-colluders", type=int, help="how many other sites might pool what they see"),
    option(
        "--keep-in",
        metavar="DIR",
        type=_folder,
        help="keep runs, registry and ledgers below this folder, outside FLARE's workspace",
    ),
    option(
        "--allow",
        type=click.Choice(FLARE_EXTRAS),
        multiple=True,
        help="let jobs start more of FLARE than VeilBoost needs: its monitoring (event counts and times), its MLflow "
        "receiver (the job names the address that the server writes to), or `flare`, its whole list: for sites that "
        "run other jobs too, and whose data those jobs then read and send without VeilBoost's policy; `none` "
        "takes it back",
    ),
)
"""What the site's policy allows, consents to and keeps."""


@command(
    "prepare a simulator workspace, a POC workspace or a site's startup kit for VeilBoost jobs",
    argument("folder", metavar="DIR", type=PATH),
    option(
        "--policy",
        metavar="FILE",
        type=PATH,
        help="take keys and values from a file of JSON, as veilboost.json writes them; other options come on top",
    ),
    *_DATA_SET_OPTIONS,
    *_POLICY_OPTIONS,
    option("--check", is_flag=True, help="change nothing, say what is missing; exit code 1 if anything is"),
    option(
        "--upgrade",
        is_flag=True,
        help="after an update of VeilBoost: complete what an earlier version has set up, and list what the policy "
        "could say since; nothing of that is switched on",
    ),
    option(
        "--example",
        is_flag=True,
        help="write data that are nobody's, and policies that consent to all that the job folders under jobs ask for, "
        "so that each runs as it stands; in an empty workspace, for trying out",
    ),
    exits={0: "set up (--check: complete)", 1: "refused or failed (--check: something is missing)"},
)
def site_setup(options: Options) -> int:
    """``veilboost site-setup DIR``: merge what a site needs to run VeilBoost jobs into its FLARE workspace.

    Files in the folder ``local`` are touched, and one beside it, and nothing of a job:

    * ``resources.json``: FLARE starts only components on the allow-list. It becomes the list of VeilBoost's own
      classes, each by its exact name, and what the site itself had added; FLARE's classes need ``--allow``. At a site,
      the streaming of its log files to the server is switched off: FLARE's default sends the error log, with the traces
      of libraries that may quote values, and any job may ask for the whole log. What the server should know of a
      failure, jobs of this package report by themselves.
    * ``authorization.json``: custom code in jobs (byoc) and the console's shell commands (cat, ls, grep, head, tail,
      pwd) are denied to every role; all other rights stay.
    * ``veilboost__p_resources.json``: starts a guard in FLARE's process, which holds to that whatever role the server
      names, and lets jobs bring their two files of JSON and FLARE's signatures, nothing else.
    * ``veilboost__j_resources.json``: has jobs' processes look for settings in the site's own folders only.
    * ``../comm_config.json``: a copy of the one here, or an empty one; FLARE takes the first that it finds.
    * ``veilboost.json``: the site's policy, which no job can change. A new one is strict; an existing one changes only
      where an option says so.

    Calling it again changes nothing more. Running jobs keep what they started with; FLARE reads rights and guard when
    it starts. Jobs refuse to begin where any of this is missing.
    """
    from nvflare_plugins.cli.site_setup import run

    return run(options)


# -- a site's own table, and its database -----------------------------------------------------------------------------


@command(
    "find all problems of a table at once, and draft what a job and the policy could say",
    argument("where", metavar="FILE_OR_DIR", type=PATH, help="a table, or the workspace of a site that is set up"),
    option("--site", metavar="NAME", help="the site's name; with a workspace"),
    option("--data-set", metavar="NAME", help="a data set of the site's policy (else those of the job)"),
    option("--job", metavar="JOB_FOLDER", type=PATH, help="check for this job: its label, features, lists"),
    option(
        "--label", metavar="COLUMN", help="check for training with this label; of survival time=COLUMN,event=COLUMN"
    ),
    option(
        "--draft", metavar="FILE.json", type=PATH, help="write the draft, without counts, for `veilboost agree`: no row"
    ),
    *FILE_OPTIONS,
    one_of=("job", "label"),
    prints_json=True,
    exits={0: "fine (notes do not count)", 1: "problems, or refused"},
)
def check(options: Options) -> int:
    """``veilboost check``: everything at once that a job would stumble over in a site's own table. Sends nothing.

    It looks at a file, or at a data set of a site that is set up, as its policy reads it. It prints counts and the
    numbers of rows, never a value of a row: of values it shows words that are known to mean "missing", and texts that
    at least ten rows share. What it drafts is taken from the data; lists and bounds in a job are public, and those of a
    private job must come from public knowledge.

    """
    from nvflare_plugins.cli.check import run

    return run(options)


@command(
    "unite the drafts of several sites: one job for all, and what each policy has to say",
    argument("drafts", nargs=-1, required=True, metavar="DRAFT.json...", type=PATH, help="named after their sites"),
    option("--out", metavar="FILE.json", type=PATH, help="write the united draft"),
    option("--data-set", metavar="NAME", default="data", help="what all sites call the data set (default: data)"),
    prints_json=True,
    exits={0: "all is made alike", 1: "something is left to decide, or refused"},
)
def agree(options: Options) -> int:
    """``veilboost agree a.json b.json c.json``: where do sites' tables differ, and what makes them alike?

    Each site writes its draft with `veilboost check FILE --label COLUMN --draft SITE.json`. It holds names of columns,
    texts that ten rows share, rounded bounds and how ids are written: no row, no count. Spellings (Yes and yes, ULM
    and Ulm), names, date forms and forms of ids are made alike by each site's policy. Other kinds of values and what
    look like other units are shown, for people to decide.

    """
    from nvflare_plugins.cli.check import agree_drafts

    return agree_drafts(options)


@command(
    "write the rows of a query to a database into a dated file that jobs read; without a name, list them",
    argument("name", metavar="[NAME]", required=False, help="a snapshot of the site's policy"),
    option("--keep", type=int, metavar="N", help="remove all but the N newest afterwards"),
    WORKSPACE,
    SITE,
)
def snapshot(options: Options) -> int:
    """``veilboost snapshot NAME``: rows of a site's database into a dated Parquet file, for jobs to read.

    Address, query and folder stand in the site's policy (``snapshots.NAME``), where no job can change them; the
    password comes from an environment variable or a file of mode 0600, and appears nowhere. The query runs in a
    transaction that only reads, where the database has such, and is rolled back. Types are kept: whole numbers,
    fractions, decimals, dates, text; NULL is missing. The file is written whole or not at all, for its owner alone
    (0600), under the name NAME-20261122T201500Z.parquet.

    A data set whose path is the folder reads the snapshot with the latest time in its name. Whoever wants to read an
    older one, or two months beside each other, names the file itself. It needs the extra ``snapshot`` and the driver of
    the database.
    """
    from nvflare_plugins.site.snapshot import take_snapshot

    policy = own_policy(options)
    if options.keep is not None and options.keep < 1:
        raise ConfigurationError("--keep: at least 1, the new one")
    if options.name is None:
        if not policy.snapshots:
            print("the policy names no snapshot. Policy key: snapshots")
        for name, source in sorted(policy.snapshots.items()):
            found = [path for path, of in snapshots_in(source.folder).items() if of == name]
            options.result.setdefault("snapshots", {})[name] = found
            print(f"{name}: {counted(len(found), 'snapshot')} in {source.folder}")
            for path in found:
                print(f"  {path.name}, {path.stat().st_size:,} bytes{', the newest' if path == found[-1] else ''}")
        return 0
    if options.name not in policy.snapshots:
        known = ", ".join(sorted(policy.snapshots)) or "none"
        raise ConfigurationError(
            f"{options.site} has no snapshot {options.name!r} (known: {known}). Policy key: snapshots."
        )
    taken = take_snapshot(policy.snapshots[options.name], options.keep)
    options.tell(snapshot=taken)
    held = (
        "the database held the query to reading" if taken.read_only else "the database cannot hold a query to reading"
    )
    print(f"{taken.path}: {counted(taken.n_rows, 'row')}, {counted(taken.n_columns, 'column')}; {held}")
    for path in taken.removed:
        print(f"{path}: removed")
    return 0


# -- what a site remembers --------------------------------------------------------------------------------------------

_WORKSPACE = argument(
    "workspace",
    metavar="WORKSPACE",
    type=PATH,
    help="the site's workspace, or the folder in which it lies under the site's name",
)


@command(
    "list the runs and searches that a site remembers",
    _WORKSPACE,
    SITE,
    option(
        "--reset-refusals",
        metavar="DATA_SET",
        help="let jobs look at the rows of a data set again, after too many were refused because of them",
    ),
)
def registry(options: Options) -> int:
    """``veilboost registry``: what a site remembers of earlier releases, and of refusals because of its rows."""
    from nvflare_plugins.site.data_refusals import Question, RefusalCount
    from nvflare_plugins.site.memory.alignments import AlignmentRegistry
    from nvflare_plugins.site.memory.registry import Registry
    from nvflare_plugins.site.memory.store import Memory

    policy = own_policy(options)
    if not Memory.is_there(policy):  # a wrong name too leads to no folder, and must not make one
        raise ConfigurationError(
            f"{options.site} remembers nothing: there is no registry in {policy.registry}; or its workspace or name is "
            "another."
        )
    refusals = RefusalCount(policy)
    if options.reset_refusals is not None:
        refusals.reset(policy.data_set(options.reset_refusals).name)
        print(f"the refusals of data set {options.reset_refusals!r} are counted from now on")
        return 0
    remembered = Registry.open(policy)
    print(remembered.describe())
    print(AlignmentRegistry.open(policy).describe())
    limit = policy.data_refusals_per_month
    options.tell(
        runs=remembered.runs(),
        refusals=refusals.counts(),
        demands=refusals.counts(Question.DEMAND),
        most_refusals_per_month=limit,
    )
    for name, count in refusals.counts().items():
        print(f"data set {name!r}: {count} of {limit} jobs that its rows may refuse within a month")
    for name, count in refusals.counts(Question.DEMAND).items():
        print(f"data set {name!r}: {count} of {limit} jobs that asked for more rows than this site's policy does")
    return 0


@command(
    "write numbers of a kit for its monitoring, also while no job runs",
    argument("kit", metavar="KIT", type=PATH, help="the startup kit of a site or of the server"),
    option("--every", metavar="SECONDS", type=click.FloatRange(1, 3600), default=30.0, help="default: 30"),
    option("--once", is_flag=True, help="write once, as from cron"),
    exits={1: "refused, failed, or --once: numbers are missing"},
)
def watch(options: Options) -> int:
    """``veilboost watch KIT``: processes, memory, disk, certificate, backups and open reservations, until it is ended.

    They go into the folder that VEILBOOST_METRICS names, beside the files of jobs, as Prometheus' node exporter reads
    them. A job whose process was killed is told as lost there. Runs as the user that runs FLARE.
    """
    from nvflare_plugins.cli.runs import watch_jobs

    return watch_jobs(options)


@command(
    "copy what a site must not lose to a new folder, while jobs go on",
    _WORKSPACE,
    argument("out", metavar="FOLDER", type=PATH, help="new folder for the copies"),
    SITE,
)
def backup(options: Options) -> int:
    """``veilboost backup``: memory, ledgers, names of models, and the policy with its trail; each copy is checked.

    Ledgers' heads are left out on purpose: they notice that a ledger was restored. FLARE may run meanwhile.
    """
    from nvflare_plugins.cli.site_setup import back_up_site

    return back_up_site(options)


@command(
    "queue persons who ask to be forgotten, and see what became of their requests",
    argument(
        "action",
        metavar="[status|add|withdraw|plan]",
        type=click.Choice(["status", "add", "withdraw", "plan"]),
        default="status",
    ),
    argument("arguments", nargs=-1, metavar="[ARGUMENT]...", help="add, withdraw: ids of persons; plan: a job's id"),
    option("--data-set", metavar="NAME", help="whose column of ids names the persons"),
    option("--file", metavar="FILE", type=PATH, help="ids, one a line; - reads standard input"),
    option("--absent", is_flag=True, help="queue ids that the data set does not hold now, too"),
    option("--job", metavar="JOB_FOLDER", type=PATH, help="plan: the folder of that job"),
    option("--out", metavar="FOLDER", type=PATH, help="plan: write a copy of it that forgets"),
    WORKSPACE,
    SITE,
)
def forget(options: Options) -> int:
    """``veilboost forget``: persons who ask to be forgotten, at one site. Sends nothing.

    `add ID... --data-set NAME` queues persons, by the data set's column of ids; from a file is better than in a shell's
    history. The site's memory keeps keyed hashes of them. From then on no job takes rows of them that none has used.
    `plan JOB_ID` shows what a job with `forgets` would leave out here, and what it needs of the other sites. Such a job
    trains that one again without them, at all sites together. `status` shows who waits, and a receipt in numbers for
    each batch that is forgotten; `withdraw` takes back requests that wait.

    """
    from nvflare_plugins.cli.forget import run

    return run(options)


@command(
    "show what a site has spent of its privacy budgets",
    _WORKSPACE,
    SITE,
    option("--data-set", metavar="NAME", help="only this data set"),
    option(
        "--html", metavar="FILE.html", type=PATH, help="write a page with spending over time instead, fit for paper"
    ),
    option("--close", metavar="JOB", help="end a job that will not go on, so that what it has not used is free again"),
    option(
        "--accept-cut",
        is_flag=True,
        help="go on with a ledger whose last records, or whose head, are lost and cannot be restored: all that may be "
        "missing is charged, the whole budget where the head is lost too",
    ),
)
def ledger(options: Options) -> int:
    """``veilboost ledger``: what a site has spent of its privacy budgets, over all jobs."""
    from dp_components.ledger import Ledger, ledger_files
    from nvflare_plugins.pages.runs_page import ledger_html

    if options.html is not None:
        check_output("--html", options.html, ".html")
    policy = own_policy(options)
    folder, heads = policy.ledgers, policy.ledger_heads
    files = [path for path in ledger_files(folder) if options.data_set in (None, path.stem)]
    if not files:
        which = "" if options.data_set is None else f" for data set {options.data_set!r}"
        raise ConfigurationError(
            f"{options.site} has spent nothing: there is no privacy ledger{which} in {folder}; or its workspace or "
            "name is another."
        )
    if (options.close is not None or options.accept_cut) and len(files) != 1:
        raise ConfigurationError("name the data set whose ledger is meant, with --data-set.")
    if options.accept_cut:
        charged = Ledger(files[0], heads).accept_cut()
        parts = zip(("mu^2", "pure epsilon", "rho", "slack"), charged.parts(), strict=True)
        print(f"Charged for what may be missing: {', '.join(f'{name} {part:.6g}' for name, part in parts)}.")
    if options.close is not None:
        Ledger(files[0], heads).close_job(options.close)
    histories = [Ledger(path, heads).history() for path in files] if options.html is not None or options.json else []
    options.tell(ledgers=histories, page=options.html)
    if options.html is not None:
        html = ledger_html(histories, policy.site, datetime.now(UTC))
        print(write_atomically(options.html, html.encode(), 0o600))
        return 0
    print("\n\n".join(Ledger(path, heads).describe() for path in files))
    return 0
