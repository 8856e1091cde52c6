"""The profile's job folder in FLARE's simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs import examples
from nvflare_plugins.cli.verify import verify
from tests.support.simulator import SITES, simulate


@pytest.mark.sim
@pytest.mark.slow
def test_job_folder_as_it_stands(tmp_path: Path) -> None:
    done = simulate(examples.FOLDER / "profile", examples.prepare("profile", tmp_path))
    assert done.code == 0, done.output[-4000:]
    assert done.summary["status"] == "completed" and done.summary["profile"] == "masks"
    pages = {(done.site(site) / "profile.html").read_bytes() for site in SITES}
    assert len(pages) == 1 and len({(done.site(site) / "local.html").read_bytes() for site in SITES}) == 3
    found = json.loads((done.site("site-1") / "profile.json").read_text())
    assert found["rows"] == 569 and len(found["ranking"]) == 30
    assert verify([done.result / "evidence"]).sound
    assert not list(done.result.rglob("local.html")), "nothing of one site is uploaded"
