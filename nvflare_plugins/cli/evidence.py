"""Commands that show what a job did: check its evidence, make its report, put all of it into a dossier."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.cli.options import (
    DAMAGED,
    PATH,
    ROOT_CERTIFICATE,
    Options,
    argument,
    check_output,
    command,
    option,
)


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if "T" not in text:
        moment += timedelta(hours=12)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


@command(
    "check the evidence of a job",
    argument(
        "paths",
        nargs=-1,
        required=True,
        metavar="PATH...",
        type=PATH,
        help="folder or files of exported evidence, or one dossier, or one decision and files that it binds",
    ),
    option(
        "--root-ca",
        metavar="FILE",
        type=PATH,
        help=f"the project's {ROOT_CERTIFICATE} from your own startup kit, never from the evidence; evidence that is "
        "not signed then fails",
    ),
    option(
        "--server",
        metavar="NAME",
        multiple=True,
        help="name of the project's server, whose certificate is not a site's (default: from the kit of --root-ca)",
    ),
    option("--job", metavar="ID", help="the job that must be shown (needed where there are several)"),
    option(
        "--at",
        metavar="TIME",
        type=_moment,
        help="when the job began, as YYYY-MM-DD or with THH:MM in UTC; certificates are judged at that time, give or "
        "take a day (default: by the clocks of those who signed)",
    ),
    prints_json=True,
    exits={
        0: "VERIFIED",
        1: "it does not hold",
        2: "UNSIGNED: the records agree, but anyone could have written them (or wrong usage)",
        3: "SIGNED, but root or server names were not given",
        4: "no such path, or no evidence at it",
        5: "the root certificate is not there, or cannot be used",
        6: "EMPTY: it shows no private message and no round",
    },
)
def verify(options: Options) -> int:
    """``veilboost verify``: check the evidence of a job.

    It looks at chains, signatures, agreement of sites and server, and the protection of every private message. A
    dossier (.zip) is checked with the evidence in it, a decision (release.json) with the files named beside it, such as
    the model; a refusal does not hold.

    """
    from nvflare_plugins.cli.verify import run

    return run(options)


@command(
    "rebuild the HTML report of a run, or make a page of it for a data-protection officer",
    argument("run_folder", metavar="RUN_DIR", type=PATH, help="folder of a run at a site"),
    option(
        "-o",
        "--output",
        "--out",
        "output",
        metavar="FILE",
        type=PATH,
        help="where to write (default: report.html in RUN_DIR)",
    ),
    option("--summary", is_flag=True, help="the page for a data-protection officer; needs --out"),
    option(
        "--evidence",
        metavar="PATH",
        type=PATH,
        multiple=True,
        help="with --summary: exported evidence of all parties, to be verified for this page",
    ),
    option(
        "--root-ca", metavar="FILE", type=PATH, help=f"with --evidence: the {ROOT_CERTIFICATE} of your own startup kit"
    ),
)
def report(options: Options) -> int:
    """``veilboost report``: rebuild report.html from run.json, the model and the evidence in a run's folder.

    With --summary it writes one page about the run for a data-protection officer instead: purpose, controller,
    retention and legal basis in the words of the site's policy (its key data_protection), what was done on which rows,
    what left the site under which protection, who could learn what, consents, the privacy budget, and what the evidence
    shows. It prints on paper. The page counts this site's rows, and is for its owner alone (mode 0600).
    """
    from nvflare_plugins.cli.verify import DOES_NOT_SHOW, SHOWS, said, trusted
    from nvflare_plugins.evidence.verification import verify as verified
    from nvflare_plugins.pages.report import build_summary, write_report
    from nvflare_plugins.pages.run_record import RunRecord

    folder, out, evidence = options.run_folder, options.output, options.evidence
    if out is not None:
        check_output("--out", out, ".html")
    if not options.summary and (evidence or options.root_ca is not None):
        raise ConfigurationError("--evidence and --root-ca belong to --summary; `veilboost verify` checks evidence")
    if options.summary and out is None:
        raise ConfigurationError("--summary needs a file to write: --out FILE.html")
    if options.root_ca is not None and not evidence:
        raise ConfigurationError("--root-ca needs --evidence: the exported logs of all parties")
    try:
        if not options.summary:
            options.tell(page=write_report(folder, out))
            print(options.result["page"])
            return 0
        record, sentences = RunRecord.read(folder), []
        if evidence:
            root, servers = trusted(options.root_ca, evidence)
            result = verified(evidence, root, servers, record.job_id)
            sentences = [*said(result), *((SHOWS, DOES_NOT_SHOW) if result.sound else ())]
        # Whole or not at all, for its owner alone: it counts rows.
        options.tell(page=write_atomically(out, build_summary(record, folder, sentences).encode(), 0o600))
        print(out)
        return 0
    except DAMAGED:  # a record is read as it was written: what its fields hold is looked at where it is used
        raise ConfigurationError(
            f"run.json or the model in {folder} is damaged, or of another version: copy the run again"
        ) from None


@command(
    "put all that this site can show of a job into one signed archive",
    argument("job", metavar="JOB", help="folder of a run at a site, or a job's id (with a workspace)"),
    option("--out", metavar="FILE.zip", type=PATH, required=True, help="archive to write"),
    option("--workspace", metavar="DIR", type=PATH, help="the site's workspace (default: where JOB lies)"),
    option("--site", metavar="NAME", help="the site's name; with a job's id"),
    option(
        "--evidence",
        metavar="PATH",
        type=PATH,
        multiple=True,
        help="exported evidence of all parties, which is verified and goes into the archive",
    ),
    option("--root-ca", metavar="FILE", type=PATH, help="with --evidence: the rootCA.pem of your own startup kit"),
    option(
        "--held-out",
        metavar="NAME",
        help="data set of the policy with rows that the model was not trained on (default: the job's evaluation set)",
    ),
    option("--no-attacks", is_flag=True, help="run no attacks, which the archive then says"),
)
def dossier(options: Options) -> int:
    """``veilboost dossier JOB``: all that this site can show of one job, in one signed archive. Sends nothing.

    A cover page, the evidence and what `verify` says of it, the policy at the time, the privacy ledger of the job's
    data sets, who could learn what, attacks on this very model, hashes of the model, a software bill of materials, the
    page for data protection, the report and the run's record. What is missing is named on the cover page, with the
    reason.

    The attacks (membership inference, reconstruction) are run here, on the site's own rows, beside rows that the model
    was not trained on; the archive gets figures over all rows. The list of all files is signed with the key of the
    site's FLARE certificate; `veilboost verify FILE.zip` checks it. The archive counts this site's rows and is for its
    owner alone (mode 0600) until he gives it away.
    """
    from nvflare_plugins.cli.dossier import run

    return run(options)
