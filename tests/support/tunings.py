"""What tunings over sites in threads leave behind."""

from __future__ import annotations

import json
from typing import Any

from tests.support.federation import Parties


def result_of(parties: Parties, job_id: str = "job") -> dict[str, Any]:
    """Return ``tuning.json``, which must be the same at every site but for seconds."""
    found: list[dict[str, Any]] = [
        json.loads((parties.run_folder(site, job_id) / "tuning.json").read_text()) for site in parties.sites
    ]
    for one in found:
        for trial in one["trials"]:
            del trial["seconds"]
    assert all(one == found[0] for one in found)
    return found[0]
