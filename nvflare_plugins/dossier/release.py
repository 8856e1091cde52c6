"""A site decides by its rules whether a model may leave, and refuses one without an approval where its policy asks.

The decision binds this site's copy of the model alone: coordinator and other sites hold the same one.

Security: an approval counts for this very model under the rules in force, and only with the site's own signature where
it has a certificate. Who may write into the site's files can copy a model without asking; this is a guard against
oversight, and a record for others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from he_processors.errors import AuthenticationError, ConfigurationError, VeilBoostError
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.attempt.run_folder import POLICY
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.base.files import write_private
from nvflare_plugins.dossier.archive import signed
from nvflare_plugins.dossier.decision import FORMAT, Decision, Judged, broken, file_sha256, open_decision
from nvflare_plugins.dossier.structure import Finding
from nvflare_plugins.evidence.audit import FlareAuthority
from nvflare_plugins.evidence.format import canonical, time_text
from nvflare_plugins.pages.report import RELEASE_FACTS
from nvflare_plugins.pages.run_record import FILE_NAME, RunRecord
from nvflare_plugins.scoring.export import strip_sum_hessian
from nvflare_plugins.site.certificates import Identity, load_identity
from nvflare_plugins.site.policy import SitePolicy, workspace_of
from nvflare_plugins.site.policy_values import ReleaseRules
from nvflare_plugins.wire.envelope import SALT_BYTES

FACTS_FORMAT = "veilboost-release-facts-1"
DECISION = "release.json"

# -- deciding ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """What is decided on.

    Attributes:
        path: of the model, in the folder of the run that ``record`` is of.
        model: the bytes that were judged.
    """

    record: RunRecord
    path: Path
    model: bytes
    rules: ReleaseRules
    findings: tuple[Finding, ...]
    by: str
    moment: datetime

    @property
    def released(self) -> bool:
        """Whether every rule is kept."""
        return all(one.holds for one in self.findings)


def decide(case: Case, identity: Identity, randomness: RandomSource = OS_RANDOMNESS) -> Decision:
    """Write facts and decision into the run's folder, for the site alone (mode 0600), in place of earlier ones.

    Raises:
        ConfigurationError: the person's name can be none, or nobody would believe the site's signature today.
    """
    folder, record, model = case.path.parent, case.record, case.model
    facts = canonical(
        {
            "format": FACTS_FORMAT,
            "time": time_text(case.moment),
            "file": case.path.name,
            "model": hashlib.sha256(model).hexdigest(),
            "by": case.by,
            "released": case.released,
            "findings": [dataclasses.asdict(one) for one in case.findings],
            "salt": randomness.bytes(SALT_BYTES).hex(),
        }
    )
    evidence = folder / record.evidence if record.evidence else None
    unsigned = Decision(
        format=FORMAT,
        site=record.site,
        job_id=record.job_id,
        attempt=record.attempt,
        profile=record.profile,
        by=case.by,
        time=time_text(case.moment),
        released=case.released,
        judged=[Judged(rule=one.rule, limit=one.limit, holds=one.holds) for one in case.findings],
        model=hashlib.sha256(model).hexdigest(),
        copy=_sha256_of_copy(model),
        rules=case.rules.fingerprint(),
        facts=hashlib.sha256(facts).hexdigest(),
        evidence=file_sha256(evidence) if evidence is not None and evidence.is_file() else None,
        certificate=None,
        signature=None,
    )
    signature = signed(identity, unsigned.statement())
    decision = dataclasses.replace(unsigned, certificate=signature["certificate"], signature=signature["signature"])
    content = canonical(dataclasses.asdict(decision))
    try:
        open_decision(content, FlareAuthority(identity.root, identity.server_names))
    except AuthenticationError as error:
        raise ConfigurationError(f"nobody would believe this site's signature today: {error}") from None
    write_private(folder / RELEASE_FACTS, facts)
    write_private(folder / DECISION, content)
    return decision


def _sha256_of_copy(model: bytes) -> str | None:
    try:
        return hashlib.sha256(strip_sum_hessian(model)).hexdigest()
    except ConfigurationError:
        return None


# -- asking for one ---------------------------------------------------------------------------------------------------


def check_released(policy: SitePolicy, path: Path, sha256: str | None = None) -> None:
    """Refuse a model of a run that the site's policy wants a decision on, and that has no approval.

    Args:
        path: of the model, in the folder of its run.
        sha256: of what is handed on, where it was read already; None takes the file as it is.

    Raises:
        PolicyRefusal: there is no decision, or it is no approval of this model under the rules in force.
    """
    if policy.release_rules is not None:
        identity = load_identity(policy.workspace, policy.site)
        authority = FlareAuthority(identity.root, identity.server_names)
        _check(policy.site, policy.release_rules, (path, sha256 or file_sha256(path)), authority, identity)


def check_copied(path: Path, model: bytes) -> None:
    """Do the same for any model that is to be copied: by the policy of the workspace that its run lies in.

    Where that is not known, the policy counts that the run's folder has kept. A model outside a run has none.

    Args:
        model: the bytes that are copied, which nobody can put others in the place of meanwhile.

    Raises:
        PolicyRefusal: as ``check_released``.
        ConfigurationError: policy or record is damaged.
    """
    path = path.resolve()  # a link elsewhere is the same model
    if not (path.parent / FILE_NAME).is_file():
        return
    record, workspace, kept = RunRecord.read(path.parent), workspace_of(path.parent), path.parent / POLICY
    if workspace is not None:
        check_released(SitePolicy.load(workspace, record.site), path, hashlib.sha256(model).hexdigest())
        return
    try:
        stated = json.loads(kept.read_bytes()).get("release_rules") if kept.is_file() else None
        rules = None if stated is None else ReleaseRules(**stated)
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ConfigurationError(f"{kept} is damaged: copy the run again") from None
    if rules is not None:
        _check(record.site, rules, (path, hashlib.sha256(model).hexdigest()), FlareAuthority(None), None)


def _check(
    site: str, rules: ReleaseRules, model: tuple[Path, str], authority: FlareAuthority, identity: Identity | None
) -> None:
    path, sha256 = model
    try:
        decision, is_signed = open_decision((path.parent / DECISION).read_bytes(), authority)
    except FileNotFoundError:
        _refuse(site, "wants a decision before a model leaves, and there is none", path)
    except VeilBoostError as error:
        _refuse(site, f"wants a decision before a model leaves, and the one here does not count: {error}", path)
    must_sign = identity is not None and identity.is_signed
    for is_wrong, why in (
        (decision.site != site, f"is one of {decision.site}"),
        (must_sign and not is_signed, "is not signed"),
        (decision.model != sha256, "is of another model, or the file has changed since"),
        (decision.rules != rules.fingerprint(), "was made under other rules than those in force"),
        (not decision.released, f"is a refusal: {broken(decision.judged)}"),
    ):
        if is_wrong:
            _refuse(site, f"wants a decision before a model leaves, and the one here {why}", path)


def _refuse(site: str, why: str, path: Path) -> NoReturn:
    raise PolicyRefusal(
        f"the policy of {site} {why}. Policy key: release_rules. Remedy: `veilboost release {path.parent}` decides "
        "under these rules, or ask the site to change them."
    )
