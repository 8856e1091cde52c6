"""``veilboost forget``: requests of persons to be forgotten, and what a job that forgets would leave out here."""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.base.files import copy_folder, write_atomically
from nvflare_plugins.base.formatting import counted, printable
from nvflare_plugins.cli.options import Options, own_policy
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import canonical, usable_ids
from nvflare_plugins.data.table import Table, load_table
from nvflare_plugins.data.tabular_files import TabularFile
from nvflare_plugins.flare.kinds import SERVER_CONFIGURATION, read_job
from nvflare_plugins.kinds.horizontal.site import TITLE
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.pooled.preparation import leave_out
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.memory.forgetting import Forgetting, Standing
from nvflare_plugins.site.memory.registry import ADDED_ROWS, ADDED_SITES, Registry
from nvflare_plugins.site.policy import SitePolicy

_STDIN = Path("-")
NOT_FORGOTTEN = (
    "Not forgotten: copies of the model that were handed on, sums and models that other sites have seen, evidence, "
    "backups, and what other data sets hold."
)


def run(options: Options) -> int:
    """Do what the command line asks."""
    policy, action, given = own_policy(options), options.action, options.arguments
    if action in ("add", "withdraw"):
        return _change(options, policy, action)
    if given if action == "status" else len(given) != 1:
        raise ConfigurationError("give nothing after status, or: plan JOB_ID, or: add ID... --data-set NAME")
    return _status(options, policy) if action == "status" else _plan(options, policy, given[0])


def _change(options: Options, policy: SitePolicy, action: str) -> int:
    if not options.data_set:
        raise ConfigurationError(f"{action} needs --data-set NAME, whose column of ids names the persons")
    spec = policy.data_set(options.data_set)
    if spec.id is None:
        raise ConfigurationError(
            f"data set {spec.name!r} has no column of ids that names persons. Policy key: data_sets.{spec.name}.id."
        )
    ids = _ids(options, spec)
    forgetting = Forgetting(policy)
    if action == "withdraw":
        n_done = forgetting.withdraw(spec.name, ids)
        print(f"{counted(n_done, 'request')} taken back; whoever is forgotten, or leaving, stays so")
    else:
        n_absent = len(set(ids) - set(_in_file(spec)))
        if n_absent and not options.absent:
            raise ConfigurationError(
                f"{n_absent} of {counted(len(ids), 'id')} are not in data set {spec.name!r}, and nobody was queued. "
                "Remedy: mend them (line numbers stay as they are); or --absent, for persons whose rows were removed "
                "from the file, or may come back"
            )
        n_done = forgetting.add(spec.name, ids)
        print(f"{counted(n_done, 'person')} queued, {len(ids) - n_done} were before: `veilboost forget plan JOB_ID`")
    also = _also_in(policy, spec, ids) if action == "add" else []
    if also:
        print(f"persons of these ids are in data sets {', '.join(map(repr, also))} too: add them there as well")
    options.tell(data_set=spec.name, changed=n_done, also_in=also)
    return 0


def _also_in(policy: SitePolicy, spec: DataSet, ids: list[str]) -> list[str]:
    """Return the names of other data sets that hold one of the ids, or that cannot be read."""
    found = []
    for other in policy.data_sets.values():
        if other.name != spec.name and other.id is not None:
            try:
                if not {canonical(one, other.id_form) for one in ids}.isdisjoint(_in_file(other)):
                    found.append(other.name)
            except VeilBoostError:
                found.append(other.name)
    return found


def _ids(options: Options, spec: DataSet) -> list[str]:
    """Return the ids that were given, in canonical form and without repeats. Raises: ConfigurationError."""
    texts = list(options.arguments)
    if options.file is not None:
        try:
            content = sys.stdin.read() if options.file == _STDIN else options.file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise ConfigurationError(f"{options.file} is no text in UTF-8: write one id a line") from None
        texts += [line for line in content.splitlines() if line.strip()]
    found = [canonical(text, spec.id_form) for text in texts]
    ids = {one for one in found if one}
    if not found or None in found or "" in found:
        raise ConfigurationError("give ids, as words or one a line (--file): texts that can be ids, at least one")
    return sorted(ids)


def _in_file(spec: DataSet) -> list[str]:
    column = TabularFile(spec).read([], [str(spec.id)], may_be_empty=True)[str(spec.id)]
    return [one for one in usable_ids(column, spec) if one is not None]


def _status(options: Options, policy: SitePolicy) -> int:
    told = []
    for queue in Forgetting(policy).queues():
        counts = Counter(map(int, queue.standing))
        waiting = queue.since[queue.standing == Standing.WAITING]
        oldest = datetime.fromtimestamp(waiting.min(), UTC).strftime("%Y-%m-%d") if waiting.size else ""
        since = f" (the first since {oldest})" if oldest else ""
        print(
            f"data set {queue.data_set!r}: {counts[Standing.WAITING]} wait{since}, {counts[Standing.LEAVING]} leave, "
            f"{counts[Standing.FORGOTTEN]} are forgotten"
        )
        receipts: list[dict[str, Any]] = []
        for batch in queue.batches:
            if batch.state < Standing.LEAVING:
                continue
            facts = {"job": batch.job, "replaces": batch.replaces, "persons": batch.persons, "rows": batch.rows}
            receipts.append({**facts, "began": batch.began, "state": batch.state.name.lower()})
            how = (
                "replaces" if batch.state is Standing.FORGOTTEN else "has begun and has no model yet; it is to replace"
            )
            print(
                f"  job {batch.job} {how} job {batch.replaces}: {counted(batch.persons, 'person')}, "
                f"{counted(batch.rows, 'row')}, {batch.began}"
            )
        told.append(
            {
                "data_set": queue.data_set,
                **{one.name.lower(): counts[one] for one in list(Standing)[1:]},
                "oldest_waits_since": oldest or None,
                "receipts": receipts,
            }
        )
    options.tell(queues=told)
    if not told:
        print("nobody has asked to be forgotten")
    return 0


def _plan(options: Options, policy: SitePolicy, job_id: str) -> int:
    if (options.job is None) != (options.out is None):
        raise ConfigurationError("give --job JOB_FOLDER and --out FOLDER together")
    record = RunRecord.read(RunFolder(policy.runs, job_id).path)
    if record.title != TITLE:
        raise ConfigurationError(
            f"job {job_id} is a {record.title}: horizontal trainings alone are trained again without persons"
        )
    if options.out is not None:
        _write_job(options.job, options.out, job_id)
    spec = policy.data_set(record.data[0].name)
    before = _table(record, spec, with_ids=Forgetting(policy).asks_for_ids(spec))
    context = SiteContext(policy.site, record.sites, "plan", bytes(16), policy.runs, policy, Identity(policy.site))
    after, whom = leave_out(before, spec, context, job_id)
    used = Registry.open(policy).used(before, spec, job_id)
    n_had = 0 if used.by_base is None else int(np.count_nonzero(used.by_base))
    n_waiting = int(np.count_nonzero(Forgetting(policy).queue(spec.name).standing == Standing.WAITING))
    n_persons = 0 if whom is None else whom.persons.size
    others = sorted(
        {one["job"] for one in Registry.open(policy).runs() if one["data_set"] == spec.name and not one["replaced_by"]}
        - {job_id}
    )
    options.tell(
        job=job_id,
        data_set=spec.name,
        persons=n_persons,
        rows=n_had - after.n_rows,
        left=after.n_rows,
        waiting=n_waiting,
        others=others,
        out=options.out,
    )
    print(f"job {job_id}, data set {spec.name!r}: {counted(n_had, 'row')} of it are in the file now")
    print(
        f"would leave here: {counted(n_persons, 'person')}, {counted(n_had - after.n_rows, 'row')}; {after.n_rows} stay"
    )
    print(f"persons who wait: {n_waiting}; with rows that only some of the earlier jobs had, they wait on")
    print(
        f"needed of all sites: {ADDED_SITES} sites that leave out 10 rows or more, {ADDED_ROWS} together, and as many "
        "that stay; or every such site's consent recompute_with_changes"
    )
    if others:
        print(f"other jobs on this data set, each to be replaced by itself: {', '.join(map(printable, others))}")
    print(NOT_FORGOTTEN)
    where = f"submit {options.out}" if options.out is not None else f'the same job with "forgets": "{job_id}"'
    print(f"next: {where}")
    return 0


def _table(record: RunRecord, spec: DataSet, *, with_ids: bool) -> Table:
    facts = record.data[0]
    return load_table(
        spec,
        label=record.settings.get("label", facts.label),
        weight=facts.weight or None,
        features=facts.columns,
        categories=facts.categories,
        label_classes=facts.label_classes or None,
        unknown_is_missing=bool(record.settings.get("unknown_category_is_missing")),
        with_ids=with_ids,
        may_lack_rows=True,
        takes_passes=True,
    )


def _write_job(folder: Path, out: Path, job_id: str) -> None:
    """Copy a job folder with the field that has it forget. Raises: ConfigurationError: it is no such job."""
    job = read_job(folder)
    type(job).from_dict({**job.to_dict(), "forgets": job_id})  # which kinds that are not horizontal refuse
    if out.exists():
        raise ConfigurationError(f"--out {printable(str(out))} is there already: name a new folder")
    copy_folder(folder, out)
    for path in out.glob(f"*/config/{SERVER_CONFIGURATION}"):
        document = json.loads(path.read_text(encoding="utf-8"))
        _add_field(document, job_id)
        write_atomically(path, json.dumps(document, indent=4).encode())


def _add_field(value: Any, job_id: str) -> None:
    if isinstance(value, dict) and isinstance(value.get("job"), dict):
        value["job"]["forgets"] = job_id
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _add_field(one, job_id)
