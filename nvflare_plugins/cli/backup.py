"""``veilboost backup``: what a site must not lose, copied while jobs run, with a list of hashes."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from dp_components.ledger import back_up, ledger_files
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import make_folder, sync_folder, write_private
from nvflare_plugins.cli.options import Options, own_policy
from nvflare_plugins.scoring.versions import NAMES_FILE
from nvflare_plugins.site.memory.store import Memory, note_backup
from nvflare_plugins.site.policy import SitePolicy, policy_path
from nvflare_plugins.site.policy_trail import FILE as TRAIL

MANIFEST = "backup.json"


def run(options: Options) -> int:
    """Write the folder, whole or not at all."""
    policy, out = own_policy(options), options.out.absolute()
    if out.exists() or out.is_symlink():
        raise ConfigurationError(f"{out} is there already: name a new folder for this backup")
    make_folder(out.parent)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as made:
        folder = Path(made) / out.name
        make_folder(folder)
        copied = _copy(policy, folder)
        hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in copied}
        manifest = {"site": policy.site, "at": datetime.now(UTC).isoformat(timespec="seconds"), "files": copied}
        write_private(folder / MANIFEST, json.dumps({**manifest, "sha256": hashes}, indent=1).encode())
        sync_folder(folder)
        folder.rename(out)
        sync_folder(out.parent)
    note_backup(policy)
    options.tell(backup=out, files=copied)
    for name, source in copied.items():
        print(f"{out / name}: copy of {source}")
    print("To restore, stop FLARE and put copies in their places. A restored ledger is refused until somebody")
    print("accepts what may have been spent since: veilboost ledger WORKSPACE --site NAME --data-set NAME --accept-cut")
    return 0


def _copy(policy: SitePolicy, folder: Path) -> dict[str, str]:
    """Copy everything that is there; return name in the backup -> where it belongs."""
    copied: dict[str, str] = {}
    if Memory.is_there(policy):
        memory = Memory.open(policy)
        memory.back_up(folder / memory.path.name)
        copied[memory.path.name] = str(memory.path)
    for ledger in ledger_files(policy.ledgers):
        back_up(ledger, folder / ledger.name)
        copied[ledger.name] = str(ledger)
    for source in (policy_path(policy.workspace, policy.site), policy.runs / NAMES_FILE, policy.runs / TRAIL):
        if source.is_file():
            shutil.copyfile(source, folder / source.name)
            (folder / source.name).chmod(0o600)
            copied[source.name] = str(source)
    return copied
