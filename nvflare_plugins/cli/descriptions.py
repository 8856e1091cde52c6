"""What subcommands say of themselves under ``--help``, where a line is not enough."""

from __future__ import annotations

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
