"""``veilboost runs``: all runs of a site, as a table, as JSON, or on a page; old ones removed; the policy's trail."""

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
from nvflare_plugins.pages.retention import due, finish_removals, remove
from nvflare_plugins.pages.run_record import REPORT, records_in
from nvflare_plugins.pages.runs_page import build_page, describe, facts_of
from nvflare_plugins.scoring.versions import ModelVersions, called_by_job
from nvflare_plugins.site.memory.forgetting import replaced_jobs
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_trail import trail


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
    write_atomically(out, build_page(policy.site, found, links).encode(), 0o600)
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
