"""``veilboost release``: may a model leave the site? By the site's rules, on its own rows; sends nothing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.attempt.run_folder import MODEL
from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.cli.options import DAMAGED, Options, as_data_set, check_output
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.dossier.decision import read_rules
from nvflare_plugins.dossier.release import DECISION, Case, decide
from nvflare_plugins.dossier.structure import Finding, judge_run, training_facts
from nvflare_plugins.pages.report import write_report
from nvflare_plugins.pages.run_record import FILE_NAME, RunRecord
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.site.certificates import load_identity
from nvflare_plugins.site.policy import SitePolicy, own_workspace, workspace_of
from nvflare_plugins.site.policy_values import ReleaseRules

REFUSED = 3


def run(options: Options) -> int:
    """Judge, write the decision, and say which rules are broken."""
    if options.write_rules is not None:
        return _write_rules(options)
    if options.model is None or options.by is None:
        raise ConfigurationError("give a model and --by NAME of who decides, or --write-rules FILE alone")
    path, record, policy = _found(options)
    rules = policy.release_rules if options.rules is None else read_rules(options.rules)
    if rules is None:
        raise ConfigurationError(
            f"the policy of {policy.site} has no rules: give --rules FILE, as --write-rules FILE writes one. Policy "
            "key: release_rules"
        )
    identity = load_identity(policy.workspace, policy.site)
    moment = datetime.now(UTC).replace(microsecond=0)
    try:
        model = FinishedModel(path.read_bytes(), path.name)  # once: another could take its place
        findings = judge_run(model, path.parent, record, policy, rules, _spec(options, record, policy))
        decision = decide(Case(record, path, model.content, rules, findings, options.by, moment), identity)
        write_report(path.parent)
    except VeilBoostError:  # some are errors of values too
        raise
    except DAMAGED:
        raise ConfigurationError(f"{FILE_NAME} or a file in {path.parent} is damaged: copy the run again") from None
    written = path.parent / DECISION
    options.tell(released=decision.released, findings=findings, rules=rules, decision=written)
    _say(findings)
    print(f"wrote {written}{'' if identity.is_signed else ', UNSIGNED: this site has no certificate'}")
    broken = sum(not one.holds for one in findings)
    verdict = (
        f"REFUSED: {broken} of {len(findings)} rules are broken" if broken else "RELEASED: the model keeps every rule"
    )
    print(f"{verdict}. That binds this site's copy; other sites of the job hold the same model")
    return REFUSED if broken else 0


def _write_rules(options: Options) -> int:
    target = options.write_rules
    check_output("--write-rules", target, ".json")
    if target.exists():
        raise ConfigurationError(f"{target} is there already: name a new file")
    write_atomically(target, json.dumps(dataclasses.asdict(ReleaseRules()), indent=2).encode() + b"\n")
    options.tell(rules=target)
    print(f"wrote {target}: the default rules, which `veilboost release --rules` and policy key release_rules take")
    return 0


def _found(options: Options) -> tuple[Path, RunRecord, SitePolicy]:
    """Return the model's file, its run's record, and the site's policy. Raises: ConfigurationError."""
    path = options.model / MODEL if options.model.is_dir() else options.model
    if not path.is_file():
        raise ConfigurationError(f"there is no model {printable(str(path))}: name a run's folder, or the model in it")
    record = RunRecord.read(path.parent)
    given = options.workspace
    workspace = workspace_of(path.parent) if given is None else own_workspace(given, record.site)
    if workspace is None:
        raise ConfigurationError(
            f"the workspace of {record.site} is not known from where the run lies: give --workspace"
        )
    return path, record, SitePolicy.load(workspace, record.site)


def _spec(options: Options, record: RunRecord, policy: SitePolicy) -> DataSet | None:
    """Return the file of training rows that was named, read as the run's data set is; None without one."""
    facts = training_facts(record)
    if options.data is None or facts is None:
        return None
    if not options.data.exists():
        raise ConfigurationError(f"there is no file {printable(str(options.data))} (--data)")
    return as_data_set(options, options.data, policy.data_set(facts.name), printable(str(options.data)))


def _say(findings: Sequence[Finding]) -> None:
    for one in findings:
        print(f"{'kept    ' if one.holds else 'BROKEN  '}{one.title}: {one.measured}; rule: {one.limit}")
        if not one.holds:
            print(f"        {one.words} Remedy: {one.remedy}. Rule: {one.rule}")
