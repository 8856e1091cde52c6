"""A finished run of a site, and its startup kit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.site.policy import SitePolicy
from tests.support.evidence_attempts import complete_attempt
from tests.support.sessions import Authority, key_number
from tests.unit.nvflare_plugins.cli.test_compare import workspace as workspace_of_compare

PROJECT = Authority()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a finished run in a site's workspace, with the policy that was recorded."""
    folder, own = workspace_of_compare(tmp_path)
    policy = SitePolicy.load(own, "site-1")
    (folder / "policy.json").write_bytes(policy.allowed())
    evidence = complete_attempt(tmp_path / "server", rounds=1)
    (folder / "evidence").mkdir()
    shutil.copy(evidence / "site-1.evidence.jsonl", folder / "evidence")
    facts = {"evidence": "evidence/site-1.evidence.jsonl", "policy_hash": policy.fingerprint(), "attempt": "a1"}
    replace(RunRecord.read(folder), **facts).write(folder)
    return folder


@pytest.fixture
def kit(run: Path) -> Path:
    """Give the site a startup kit; return a root certificate that lies elsewhere."""
    startup, elsewhere = run.parents[1] / "startup", run.parents[2] / f"{run.parents[1].name}-kit"
    startup.mkdir()
    elsewhere.mkdir()
    files = {
        "client.crt": PROJECT.issue("site-1", 1).public_bytes(Encoding.PEM),
        "client.key": key_number(1).private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()),
        "rootCA.pem": PROJECT.root.public_bytes(Encoding.PEM),
        "fed_client.json": json.dumps({"servers": [{"name": "project", "identity": "server1"}]}).encode(),
    }
    for name, content in files.items():
        (startup / name).write_bytes(content)
    for name in ("rootCA.pem", "fed_client.json"):
        (elsewhere / name).write_bytes(files[name])
    return elsewhere / "rootCA.pem"
