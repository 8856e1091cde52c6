"""The guides do what they say: their commands, as they stand there, one after the other in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from nvflare_plugins.site.policy import SitePolicy
from tests.test_documents import ROOT, guide_commands, guide_files

JOBS = ROOT / "jobs"
TIMEOUT_S = 900
FLARES_OWN = {f"{name}.json.default" for name in ("authorization", "log_config", "resources")} | {"privacy.json.sample"}
_SHELL = f"""
veilboost() {{ "{sys.executable}" -m nvflare_plugins "$@"; }}
python() {{ "{sys.executable}" "$@"; }}
nvflare() {{ "{Path(sys.executable).with_name("nvflare")}" "$@"; }}
"""


def run_guide(name: str, folder: Path, further: Sequence[str] = ()) -> dict[str, int]:
    """Run a guide with ``folder`` in the place of /tmp. Returns the exit code of every command.

    Args:
        further: commands before the guide's last one, in the same shell.
    """
    guide = JOBS / f"{name}.md"
    lines = [_SHELL]
    for where, code in guide_files(guide):
        path = Path(where.replace("/tmp", str(folder)))  # noqa: S108
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code.replace("/tmp", str(folder)))  # noqa: S108
    told = list(guide_commands(guide))
    told = [*told[:-1], *further, *told[-1:]]
    commands = [command.replace("/tmp", str(folder)) for command in told]  # noqa: S108
    for number, command in enumerate(commands):
        lines.append(f'{command}\necho "@@ {number} $?"')
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],  # noqa: S607
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    codes = dict(re.findall(r"(?m)^@@ (\d+) (\d+)$", done.stdout))
    assert len(codes) == len(commands), done.stdout[-4000:]
    print(f"{name}: {len(commands)} commands, {time.monotonic() - began:.0f} s")  # noqa: T201
    print(done.stdout[-6000:])  # noqa: T201  # for whoever reads why it failed
    return {command: int(codes[str(number)]) for number, command in enumerate(commands)}


def expected(command: str) -> int:
    """Return the exit code that the guides announce."""
    if command.startswith("veilboost verify") and "--root-ca" not in command:
        return 2  # simulated sites have no certificates
    return 1 if re.match(r"veilboost check \S+/2026-08.csv|.* --check$", command) else 0  # a raw file has problems


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize(("name", "scores"), [("HOSPITAL", "hospital/october.csv"), ("PRIVACY", "private/october.csv")])
def test_guides_of_the_simulator(name: str, scores: str, tmp_path: Path) -> None:
    codes = run_guide(name, tmp_path)
    assert codes == {command: expected(command) for command in codes}
    assert len(pd.read_csv(tmp_path / scores)) == 300
    assert "Verification" in next(tmp_path.glob("*/officer.html")).read_text()


@pytest.mark.poc
@pytest.mark.parametrize(
    ("name", "scores"), [("OPERATOR", "*/october.csv"), ("BANK", "bank/kept/*/*/*/predictions.csv")]
)
def test_guides_of_the_poc(name: str, scores: str, tmp_path: Path) -> None:
    codes = run_guide(name, tmp_path)
    assert codes == {command: expected(command) for command in codes}
    assert len(pd.read_csv(next(tmp_path.glob(scores)))) >= 300


@pytest.mark.sim
@pytest.mark.slow
def test_the_page_on_running_it(tmp_path: Path) -> None:
    """Its commands end as it says; certificates are renewed without forgetting, and removal leaves FLARE's own kit."""
    codes = run_guide("RUNNING", tmp_path)
    assert codes == {command: expected(command) for command in codes}
    kits = [tmp_path / "running" / name / "veilboost_poc" / "prod_00" / "site-1" for name in ("project", "renewed")]
    before, after = (SitePolicy.load(kit, "site-1") for kit in kits)
    assert (before.registry, before.ledgers, before.ledger_heads) == (after.registry, after.ledgers, after.ledger_heads)
    assert before.registry.is_relative_to(tmp_path / "running" / "kept")
    roots = [(kit / "startup" / "rootCA.pem").read_bytes() for kit in kits]
    assert roots[0] != roots[1]
    left = {path.name for path in (kits[0] / "local").iterdir()}
    assert left == {"veilboost.json", "log_config.json", *FLARES_OWN}
    assert '"DEBUG"' in (kits[0] / "local" / "log_config.json").read_text()
