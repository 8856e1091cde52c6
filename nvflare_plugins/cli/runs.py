"""``veilboost runs``, ``compare`` and ``watch``: what a site has trained, and what runs there now.

``runs`` shows all runs of a site, as a table, as JSON, or on a page, removes old ones and shows the policy's trail.
``compare`` sets models of the site's own rows beside a run's model. ``watch`` writes numbers of health beside FLARE.
"""

from __future__ import annotations

import dataclasses
import json
import os
from datetime import UTC, datetime
from urllib.parse import quote

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.base.formatting import human_bytes, printable
from nvflare_plugins.cli.options import Options, check_output, own_policy
from nvflare_plugins.evidence.reader import dead_logs
from nvflare_plugins.flare.metrics import FOLDER_VARIABLE, metrics_folder
from nvflare_plugins.flare.watch import run as watch
from nvflare_plugins.pages.profile_page import FILE_NAME, comparison_html
from nvflare_plugins.pages.run_record import REPORT, RunRecord, records_in
from nvflare_plugins.pages.runs_page import describe, due, facts_of, finish_removals, remove, runs_html
from nvflare_plugins.scoring.comparison import compare_run
from nvflare_plugins.scoring.versions import ModelVersions, called_by_job
from nvflare_plugins.site.flare_boundary import Role
from nvflare_plugins.site.memory.forgetting import replaced_jobs
from nvflare_plugins.site.policy import SitePolicy, own_workspace, trail, workspace_of
from nvflare_plugins.site.runtimes import site_name
from nvflare_plugins.site.setup import workspaces


def run(options: Options) -> int:
    """Print the runs, and write the page where one is asked for; or remove old ones, or show the policy's trail."""
    if sum((options.html is not None, options.prune, options.policy_changes)) > 1:
        raise ConfigurationError("give one of --html, --prune and --policy-changes")
    policy = own_policy(options)
    if options.policy_changes:
        return _show_trail(options, policy)
    return _prune(options, policy) if options.prune or options.yes else _list(options, policy)


def _list(options: Options, policy: SitePolicy) -> int:
    out, unread = options.html, list[str]()
    if out is not None:
        check_output("--html", out, ".html")
    names: dict[str, list[str]] = {}
    for (job, _), called in called_by_job(ModelVersions(policy.runs).names()).items():
        names.setdefault(job, []).extend(called)
    replaced = replaced_jobs(policy)
    for log in dead_logs(policy.runs):
        unread.append(f"{log.parent.parent.name}: its process died, and the next job here ends its evidence")
    found = [
        (run, facts_of(run, at.name, names.get(at.name, []), replaced.get(at.name)))
        for at, run in records_in(policy.runs, unread)
    ]
    found.sort(key=lambda one: one[1]["finished"], reverse=True)
    facts = [one for _, one in found]
    if options.json:
        print(json.dumps({"site": policy.site, "runs": facts, "left_out": unread}, indent=1))
    else:
        print("\n".join([describe(facts), *(f"left out: {printable(text, 1000)}" for text in unread)]))
    if out is None:
        return 0
    reports = {one["job"]: policy.runs / one["job"] / REPORT for one in facts}
    links = {job: quote(os.path.relpath(path, out.parent)) for job, path in reports.items() if path.is_file()}
    write_atomically(out, runs_html(policy.site, found, links).encode(), 0o600)
    if not options.json:
        print(f"wrote {printable(str(out))}: for this site only, sent nowhere")
    return 0


def _show_trail(options: Options, policy: SitePolicy) -> int:
    changes = trail(policy.runs)
    lines = [
        f"{one.at}  {printable(one.owner)}, file of {one.written}, noticed by {printable(one.noticed_by)}: "
        f"{', '.join(map(printable, one.changed))}"
        for one in changes
    ]
    if options.json:
        print(json.dumps({"policy_changes": [dataclasses.asdict(one) for one in changes]}, indent=1))
    else:
        print("\n".join(lines or ["no line yet: the next job or `veilboost site-setup` writes the first"]))
    return 0


def _prune(options: Options, policy: SitePolicy) -> int:
    """Say what goes, and with --yes remove it."""
    if not options.prune:
        raise ConfigurationError("--yes belongs to --prune")
    if policy.retention is None:
        raise ConfigurationError(
            f"the policy of {policy.site} says nothing of how long runs are kept. Policy key: retention. Remedy: give "
            'it days, such as {"run_days": 365, "evidence_days": 3650}'
        )
    unread: list[str] = []
    named = {job for job, _ in called_by_job(ModelVersions(policy.runs).names())}
    removals, stay = due(list(records_in(policy.runs, unread)), policy.retention, named, datetime.now(UTC))
    word, lines = "removed" if options.yes else "may go", list[str]()
    if options.yes:
        finish_removals(policy.runs)
    for one in removals:
        if options.yes:
            remove(one)
        what = "" if one.whole else "; its record and evidence stay"
        lines.append(f"{word}: {one.folder.name}, {human_bytes(one.n_bytes)}{what}")
    lines += [f"stays: {name}, {why}" for name, why in stay.items()]
    lines += [f"stays: {printable(text, 1000)}" for text in unread]
    lines += [] if options.yes or not removals else ["nothing was removed: add --yes"]
    if options.json:
        going = {one.folder.name: {"whole": one.whole, "bytes": one.n_bytes} for one in removals}
        print(json.dumps({word.replace(" ", "_"): going, "stays": stay, "left_out": unread}, indent=1))
    else:
        print("\n".join(lines or ["no run is old enough"]))
    return 0


def compare_runs(options: Options) -> int:
    """Train on the site's own rows, compare, write the page into the run's folder."""
    policy = _policy(options, RunRecord.read(options.run_folder))
    result = compare_run(options.run_folder, policy, options.data_set)
    path = write_atomically(options.run_folder / FILE_NAME, comparison_html(result).encode(), 0o600)
    for one in result.metrics:
        print(
            f"{one.name:<18} alone {one.best_alone:.4g}  federated {one.federated:.4g}  "
            f"difference {one.federated - one.best_alone:+.4g} ({one.low:+.3g} to {one.high:+.3g}): {one.verdict}"
        )
    options.tell(page=path, metrics=result.metrics)
    print(f"wrote {path}: for this site only, sent nowhere")
    return 0


def _policy(options: Options, record: RunRecord) -> SitePolicy:
    workspace = options.workspace or workspace_of(options.run_folder)
    if workspace is None:
        raise ConfigurationError("the run does not lie in the site's workspace: name that with --workspace DIR")
    return SitePolicy.load(own_workspace(workspace, record.site), record.site)


def watch_jobs(options: Options) -> int:
    """Write until the process is ended, or once."""
    folder = metrics_folder()
    if folder is None or not folder.is_dir():
        raise ConfigurationError(f"the environment variable {FOLDER_VARIABLE} names no folder: set it as for FLARE")
    kits = workspaces(options.kit)
    if len(kits) != 1 or kits[0][1] is Role.SIMULATOR:
        raise ConfigurationError(f"{options.kit} is not the startup kit of one site or server")
    kit, role = kits[0][0].absolute(), kits[0][1]
    who, wrong = "server" if role is Role.SERVER else site_name(kit), ""
    for wrong in watch(kit, role, who, folder, None if options.once else options.every):
        at = datetime.now(UTC).isoformat(timespec="seconds")
        print(f"{at}  {printable(wrong, 1000) or 'all numbers are written'}", flush=True)
    return 1 if wrong else 0
