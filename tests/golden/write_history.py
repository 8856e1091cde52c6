"""``python -m tests.golden.write_history`` wrote what lies at sites today; it overwrites nothing.

A later version gets new folders beside the old ones: what sites have stays what it is.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from jobs import examples
from nvflare_plugins.site.flare_boundary import GUARD_STARTED
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.setup import SetupOptions, set_up
from tests.golden.evidence import write_evidence
from tests.golden.site import write_site

HERE = Path(__file__).parent
WORKSPACE = "{workspace}"

FLARES_RIGHTS = {
    "format_version": "1.0",
    "permissions": {
        "project_admin": "any",
        "org_admin": {"submit_job": "none", "view": "any", "operate": "o:site", "shell_commands": "o:site"},
        "lead": {"submit_job": "any", "manage_job": "n:submitter", "byoc": "any"},
        "member": {"view": "any"},
    },
}
WISHES = SetupOptions(
    {"train": "/data/{site}/train.csv"},
    ("masks", "dp_distributed", "paillier"),
    ("exact_cuts", "explain"),
    4,
    2,
    {"train": "person"},
    {"train": {"epsilon": 2.0, "delta": 1e-6, "pure_epsilon": 0.5, "rows_per_person": 3}},
    keep_in="/srv/kept",
)
EVERY_KEY = {
    "data_sets": {
        "train": {
            "path": "/data/{site}/train.csv",
            "format": "csv",
            "separator": ";",
            "missing": ["NA", "?"],
            "max_rows": 5000,
            "id": "person",
            "aliases": {"age": "a", "income": "b"},
            "privacy": {"epsilon": 2.0, "delta": 1e-6, "pure_epsilon": 0.5, "rows_per_person": 3},
        },
        "held": {"path": "held.parquet"},
    },
    "allowed_profiles": [
        "masks",
        "bfv",
        "ckks",
        "plain",
        "paillier",
        "dp_distributed",
        "dp_trusted",
        "dp_local",
    ],
    "min_sites": 5,
    "max_colluders": 2,
    "min_key_bits": 2048,
    "min_rows_per_cut": 20,
    "min_effective_rows": 300,
    "min_rows_per_node": 6,
    "max_bins": 512,
    "max_depth": 9,
    "max_rounds": 700,
    "unsigned_sessions": True,
    "pinned_fingerprints": {"site-2": "ab" * 32},
    "consents": {
        "plain_profile": True,
        "exact_cuts": True,
        "exact_leaves": True,
        "fewer_than_three_sites": True,
        "recompute_with_changes": True,
        "second_quantile_search": True,
        "exact_bins": True,
        "merge_model": True,
        "explain": True,
        "exact_use_of_budgeted_data": True,
    },
    "inputs": "given",
    "registry": "reg/{site}",
    "tracking": False,
    "arithmetic": "gmpy2",
    "ledgers": "led/{site}",
    "runs": "kept_runs",
    "ledger_heads": "heads/{site}",
    "vertical": {
        "min_rows_per_node": 30,
        "max_bins": 16,
        "max_sums_per_row": 50,
        "max_split_bits_per_row": 60,
        "min_intersection": 7,
        "max_size_ratio": 8,
        "predictions_per_row": 9,
        "predictions_per_job": 1000,
    },
    "share_data_errors": True,
    "data_refusals_per_month": 11,
}


def policy_values(policy: SitePolicy) -> dict:
    """Return what a policy was read as, with its workspace left open."""
    values = {key: value for key, value in dataclasses.asdict(policy).items() if key not in ("site", "workspace")}
    text = json.dumps(values, default=str, sort_keys=True)
    return json.loads(text.replace(str(policy.workspace), WORKSPACE))


def write_set_up(folder: Path) -> None:
    """Write what ``veilboost site-setup`` leaves at a site and a server, and policies with what they are read as."""
    for name, role in (("hospital-a", "client"), ("server", "server")):
        kit = folder / name
        (kit / "startup").mkdir(parents=True)
        (kit / "local").mkdir()
        (kit / "startup" / f"fed_{role}.json").write_text("{}")
        resources = {"format_version": 2, "class_allow_list": list(DEFAULT_CLASS_ALLOW_LIST), "components": []}
        (kit / "local" / "resources.json.default").write_text(json.dumps(resources))
        (kit / "local" / "authorization.json.default").write_text(json.dumps(FLARES_RIGHTS))
        set_up(kit, WISHES)
        (kit / GUARD_STARTED).write_text('{"started": "2026-11-22T07:00:00+0000", "pid": 1}\n')
    every = folder / "every-key"
    (every / "local").mkdir(parents=True)
    (every / "local" / "veilboost.json").write_text(json.dumps(EVERY_KEY, indent=2) + "\n")
    for kit, site in ((folder / "hospital-a", "hospital-a"), (every, "site-1")):
        values = policy_values(SitePolicy.load(kit, site))
        (kit / "policy_read_as.json").write_text(json.dumps(values, indent=1) + "\n")


def write_job_folders(path: Path) -> None:
    """Write all shipped configurations, and the class paths in them."""
    folders = {}
    for meta in sorted(examples.FOLDER.glob("*/meta.json")):
        config = meta.parent / "app" / "config"
        folders[meta.parent.name] = {
            side: json.loads((config / f"config_fed_{side}.json").read_text()) for side in ("client", "server")
        }
    paths = sorted({path for folder in folders.values() for path in _paths_in(folder)})
    path.write_text(json.dumps({"class_paths": paths, "folders": folders}, indent=1) + "\n")


def _paths_in(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node["path"]] if isinstance(node.get("path"), str) else []
        return own + [path for value in node.values() for path in _paths_in(value)]
    return [path for value in node for path in _paths_in(value)] if isinstance(node, list) else []


WRITERS: dict[str, Callable[[Path], None]] = {
    "job_folders.json": write_job_folders,
    "set_up": write_set_up,
    "evidence_3": write_evidence,
    "site_3": write_site,
}


if __name__ == "__main__":
    for name, write in WRITERS.items():
        target = HERE / name
        if target.exists():
            print(f"{name} is there and stays as it is", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / name)
            if (Path(folder) / name).is_dir():
                shutil.copytree(Path(folder) / name, target)
            else:
                shutil.copy(Path(folder) / name, target)
        print(name)
