"""``veilboost runs``: all runs of a site, as a table, as JSON, or on a page."""

from __future__ import annotations

import json
import os
from urllib.parse import quote

from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.cli.options import Options, check_output, own_policy
from nvflare_plugins.pages.run_record import REPORT, records_in
from nvflare_plugins.pages.runs_page import build_page, describe, facts_of
from nvflare_plugins.scoring.versions import ModelVersions, called_by_job


def run(options: Options) -> int:
    """Print the runs, and write the page where one is asked for."""
    out, policy, unread = options.html, own_policy(options), list[str]()
    if out is not None:
        check_output("--html", out, ".html")
    names: dict[str, list[str]] = {}
    for (job, _), called in called_by_job(ModelVersions(policy.runs).names()).items():
        names.setdefault(job, []).extend(called)
    found = [(run, facts_of(run, at.name, names.get(at.name, []))) for at, run in records_in(policy.runs, unread)]
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
