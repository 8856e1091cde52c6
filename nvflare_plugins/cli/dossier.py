"""``veilboost dossier`` and ``release``: what a site can show of one job, and whether its model may leave.

A dossier is one signed archive. A release is judged by the site's rules, on its own rows; it sends nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from dp_components.ledger import LedgerHistory
from he_processors.errors import AuthenticationError, ConfigurationError, ProtocolError, VeilBoostError
from nvflare_plugins.attempt.run_folder import MODEL, RunFolder
from nvflare_plugins.base.files import write_atomically, write_private
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.cli.options import DAMAGED, Options, as_data_set, check_output
from nvflare_plugins.cli.verify import render, said, to_json, trusted, verdict_text
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.dossier.archive import Dossier, open_dossier, seal
from nvflare_plugins.dossier.attacks import AttackReport, allowed, attack_run, build_page
from nvflare_plugins.dossier.decision import read_rules
from nvflare_plugins.dossier.parts import (
    COVER,
    Facts,
    Part,
    as_json,
    bill,
    build_cover,
    histories,
    ledger_part,
    models_part,
    policy_part,
    threats_part,
)
from nvflare_plugins.dossier.release import DECISION, Case, decide
from nvflare_plugins.dossier.structure import Finding, judge_run, training_facts
from nvflare_plugins.evidence.audit import FlareAuthority
from nvflare_plugins.evidence.format import time_text
from nvflare_plugins.evidence.reader import Log, read_log
from nvflare_plugins.evidence.verification import Verification, find_evidence, verify
from nvflare_plugins.pages.charts import page
from nvflare_plugins.pages.report import build_report, build_summary, own_evidence, write_report
from nvflare_plugins.pages.run_record import FILE_NAME, RunRecord
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.site.certificates import Identity, load_identity
from nvflare_plugins.site.policy import SitePolicy, own_workspace, workspace_of
from nvflare_plugins.site.policy_values import ReleaseRules, is_private


def run(options: Options) -> int:
    """Gather, attack, write, and say what is in it and what is not."""
    check_output("--out", options.out, ".zip")
    folder, workspace = _found(options)
    record = RunRecord.read(folder)
    try:
        content, parts = _dossier(options, folder, workspace, record)
    except DAMAGED:
        raise ConfigurationError(f"{FILE_NAME} or a file in {folder} is damaged: copy the run again") from None
    write_private(options.out, content)
    for part in parts:
        state = "has" if part.members else "missing" if part.is_due else "none"
        print(f"{state:<8}{part.title}{f': {part.missing}' if part.missing else ''}")
    options.tell(archive=options.out, missing={part.title: part.missing for part in parts if part.missing})
    print(f"wrote {options.out}: it holds this site's own evidence and counts of its rows")
    return 0


def _found(options: Options) -> tuple[Path, Path | None]:
    """Return the run's folder, and the site's workspace if it can be told. Raises: ConfigurationError."""
    given, workspace, site = Path(options.job), options.workspace, options.site
    if (given / FILE_NAME).is_file():
        if workspace is None:
            return given, workspace_of(given)
        return given, own_workspace(workspace, RunRecord.read(given).site)
    if workspace is None or site is None:
        raise ConfigurationError(
            f"{options.job} is not the folder of a run: give that, or a job's id with --workspace DIR --site NAME"
        )
    own = own_workspace(workspace, site)
    return RunFolder(SitePolicy.load(own, site).runs, options.job).path, own


def _dossier(options: Options, folder: Path, workspace: Path | None, record: RunRecord) -> tuple[bytes, list[Part]]:
    policy = None if workspace is None else SitePolicy.load(workspace, record.site)
    identity = Identity.unsigned(record.site) if workspace is None else load_identity(workspace, record.site)
    if identity.site != record.site:
        raise ConfigurationError(f"the startup kit is that of {identity.site}, and the run is one of {record.site}")
    created = datetime.now(UTC).replace(microsecond=0)
    evidence = own_evidence(record, folder)
    log = evidence if isinstance(evidence, Log) else None
    ledgers, problems = histories(record, policy)
    verification, logs = _verification(options, folder, record)
    report = _attacks(options, folder, policy, record, ledgers, log)
    verdict = "" if verification is None else verdict_text(verification)
    parts = [
        _attack_part(report, record),
        _structure_part(folder, policy, record),
        _decision_part(folder, policy),
        _page(
            "data_protection.html", "The page for data protection", build_summary(record, folder, said(verification))
        ),
        _page("report.html", "The report of the run", build_report(record, folder)),
        _verification_part(verification),
        logs,
        policy_part(record, folder, policy),
        ledger_part(record, ledgers, problems, is_private=is_private(record.profile)),
        threats_part(record, log),
        models_part(folder),
        Part("Software bill of materials (CycloneDX)", {"bom.cdx.json": bill(time_text(created))}),
        Part("The site's own record of the run", {FILE_NAME: (folder / FILE_NAME).read_bytes()}),
    ]
    facts = Facts(verdict, report.summary, identity.is_signed, created)
    members = {COVER: build_cover(record, parts, facts).encode()}
    members |= {name: content for part in parts for name, content in part.members.items()}
    dossier = Dossier(record.job_id, record.attempt, record.site, record.profile, created, members, identity.is_signed)
    try:
        sealed = seal(dossier, identity)
        open_dossier(sealed, FlareAuthority(identity.root, identity.server_names))
    except ValueError as error:
        raise ConfigurationError(f"{error}: name fewer files as --evidence") from None
    except AuthenticationError as error:
        raise ConfigurationError(f"nobody would believe this site's signature today: {error}") from None
    return sealed, parts


def _page(name: str, title: str, html: str) -> Part:
    return Part(title, {name: html.encode()})


# -- evidence ---------------------------------------------------------------------------------------------------------


def _verification(options: Options, folder: Path, record: RunRecord) -> tuple[Verification | None, Part]:
    """Return what ``veilboost verify`` says of the logs that were named, and all logs of this job."""
    if options.root_ca is not None and not options.evidence:
        raise ConfigurationError("--root-ca needs --evidence: the exported logs of all parties")
    own = [] if record.evidence is None else [folder / record.evidence]
    try:
        files = [*(path for path in own if path.is_file()), *find_evidence(options.evidence)]
    except FileNotFoundError as error:
        raise ConfigurationError(str(error)) from None
    members = _logs_of(files, own, record)
    title = "Evidence: the parties' logs of the job"
    if not members:
        return None, Part(title, missing="the run's folder has no log, and none was named (`--evidence`)")
    if not options.evidence:
        text = "this site's log alone; `--evidence` adds those of all parties, which the server's job result holds"
        return None, Part(title, members, remark=text)
    root, servers = trusted(options.root_ca, options.evidence)
    return verify(files, root, servers, record.job_id), Part(title, members)


def _logs_of(files: Sequence[Path], own: Sequence[Path], record: RunRecord) -> dict[str, bytes]:
    """Return the logs of the run's job; this site's own also where it cannot be read."""
    members: dict[str, bytes] = {}
    for path in files:
        try:
            log = read_log(path)
        except ProtocolError:
            if path in own:
                members[f"evidence/{path.name}"] = path.read_bytes()
            continue
        if log.job_id == record.job_id:
            prefix = "" if log.attempt == record.attempt else f"{log.attempt[:32]}."
            _add(members, f"{prefix}{log.site}", path.read_bytes())
    return members


def _add(members: dict[str, bytes], name: str, content: bytes) -> None:
    """Take a log in, once; a second and different one of the same party under a name of its own."""
    for number in range(1, 100):
        member = f"evidence/{name}{'' if number == 1 else f'.{number}'}.evidence.jsonl"
        if members.setdefault(member, content) == content:
            return
    raise ConfigurationError(f"there are a hundred different logs of {name}: name fewer files as --evidence")


def _verification_part(result: Verification | None) -> Part:
    title = "What veilboost verify says of the evidence"
    if result is None:
        return Part(
            title,
            missing="the logs of the other parties were not named (`--evidence PATH --root-ca FILE`), and one log "
            "alone can be compared with nothing",
        )
    stated = {"verification.txt": render(result).encode() + b"\n", "verification.json": as_json(to_json(result))}
    return Part(title, stated)


# -- attacks ----------------------------------------------------------------------------------------------------------


def _attack_part(report: AttackReport, record: RunRecord) -> Part:
    html = build_page(report, record.job_id, record.site)
    files = {"attacks.html": html.encode(), "attacks.json": as_json(report.to_dict())}
    remark = f"no attack was run: {report.reason}" if report.reason else ""
    return Part("Attacks on the model", files, remark=remark)


def _structure_part(folder: Path, policy: SitePolicy | None, record: RunRecord) -> Part:
    """Judge the run's model by the site's rules of release, or say why not."""
    title = "What the model's structure tells"
    if policy is None or record.model is None:
        return Part(title, missing="the job has left no model here, or the site's workspace was not named")
    rules = policy.release_rules or ReleaseRules()
    try:
        model = FinishedModel((folder / record.model).read_bytes(), record.model)
        findings = judge_run(model, folder, record, policy, rules)
    except (VeilBoostError, OSError) as error:
        return Part(title, missing=str(error) if isinstance(error, VeilBoostError) else type(error).__name__)
    facts = {"findings": findings, "job_id": record.job_id, "site": record.site}
    html = page("structure.html", own_rules=policy.release_rules is not None, **facts)
    stated = {"rules": asdict(rules), "findings": [asdict(one) for one in findings]}
    broken = [one.title for one in findings if not one.holds]
    remark = f"broken rules: {'; '.join(broken)}" if broken else "every rule is kept"
    return Part(title, {"structure.html": html.encode(), "structure.json": as_json(stated)}, remark=remark)


def _decision_part(folder: Path, policy: SitePolicy | None) -> Part:
    """Return the decision of ``veilboost release``, if there is one."""
    path, title = folder / DECISION, "The decision whether the model may leave"
    if path.is_file():
        return Part(title, {DECISION: path.read_bytes()})
    is_due = policy is not None and policy.release_rules is not None
    return Part(title, missing="nobody has asked for one (`veilboost release`)", is_due=is_due)


def _attacks(
    options: Options,
    folder: Path,
    policy: SitePolicy | None,
    record: RunRecord,
    ledgers: list[LedgerHistory],
    log: Log | None,
) -> AttackReport:
    """Run the attacks on this site's rows, or say why not."""
    if options.no_attacks:
        return AttackReport("whoever wrote this dossier asked for none (--no-attacks)")
    try:
        return attack_run(folder, record, policy, options.held_out, allowed(record, ledgers, log))
    except (VeilBoostError, OSError) as error:
        text = str(error) if isinstance(error, VeilBoostError) else type(error).__name__
        return AttackReport(text.rstrip("."))


REFUSED = 3


def decide_release(options: Options) -> int:
    """Judge, write the decision, and say which rules are broken."""
    if options.write_rules is not None:
        return _write_rules(options)
    if options.model is None or options.by is None:
        raise ConfigurationError("give a model and --by NAME of who decides, or --write-rules FILE alone")
    path, record, policy = _facts_for_release(options)
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
    write_atomically(target, json.dumps(asdict(ReleaseRules()), indent=2).encode() + b"\n")
    options.tell(rules=target)
    print(f"wrote {target}: the default rules, which `veilboost release --rules` and policy key release_rules take")
    return 0


def _facts_for_release(options: Options) -> tuple[Path, RunRecord, SitePolicy]:
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
