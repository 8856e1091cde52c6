"""Evidence that sites and servers hold of earlier jobs still verifies under the root of their project."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from nvflare_plugins.cli.main import main
from nvflare_plugins.evidence import audit as evidence_audit
from nvflare_plugins.evidence import audit as evidence_certificates
from tests.support.evidence_attempts import rewrite

HERE = Path(__file__).parent
WRITTEN = HERE / "evidence_3"
KINDS = ("horizontal", "vertical", "private")


def verify(folder: Path, job: str) -> int:
    """Call ``veilboost verify`` with the root of the project's startup kit; return its exit code."""
    root = WRITTEN / "startup" / "rootCA.pem"
    return main(["verify", str(folder), "--root-ca", str(root), "--job", job])


@pytest.mark.parametrize("kind", KINDS)
def test_signed_evidence_verifies(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list((WRITTEN / kind).glob("*.jsonl"))) == 4
    assert verify(WRITTEN / kind, f"golden-{kind}") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"VERIFIED: job golden-{kind}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log", ["server", "site-2"])
def test_one_changed_character_fails(kind: str, log: str, tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / kind, tmp_path, dirs_exist_ok=True)
    path = tmp_path / f"{log}.evidence.jsonl"
    content = path.read_bytes()
    at = content.index(b'"size":') + len(b'"size":')
    path.write_bytes(content[:at] + (b"1" if content[at : at + 1] != b"1" else b"2") + content[at + 1 :])
    assert verify(tmp_path, f"golden-{kind}") == 1


def test_it_verifies_after_the_certificates_have_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2050, 1, 1, tzinfo=tz or UTC)

    for module in (evidence_audit, evidence_certificates):
        monkeypatch.setattr(module, "datetime", Later)
    assert verify(WRITTEN / "horizontal", "golden-horizontal") == 0


@pytest.mark.parametrize("written", ["veilboost-evidence-1", "veilboost-evidence-2"])
def test_earlier_formats_are_refused_by_name(written: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def earlier(records: list[dict]) -> None:
        records[0]["format"] = written

    shutil.copytree(WRITTEN / "horizontal", tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("*.jsonl"):
        rewrite(path, earlier)
    assert verify(tmp_path, "golden-horizontal") == 1
    said = capsys.readouterr().out
    assert f"evidence of format {written}: a version of VeilBoost before 0.8 wrote it" in said
    assert "verify it with VeilBoost 0.10" in said
