"""Where FLARE runs the jobs of a kit, and what of the site's machine a job sees there.

As provisioned, a job is a process beside FLARE's own and sees what it sees. ``nvflare deploy prepare`` writes a copy of
the kit whose jobs run in containers (Docker, Kubernetes) or on nodes of a cluster (Slurm). A container sees ``startup``
and ``local`` of the kit, its own job's folder, and what ``local/study_runtime.yaml`` mounts, as
``/data/STUDY/DATASET``; everything else that it writes is gone when it ends. A registry or a privacy ledger there would
begin anew with every job and forget what was released, so such a set-up is refused. And each new ``nvflare deploy
prepare`` deletes the copy that it wrote before, with all that lies in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from enum import Enum
from pathlib import Path, PurePosixPath

from nvflare.app_opt.job_launcher.study_runtime import load_study_runtime_file, study_runtime_file_path

from he_processors.errors import ConfigurationError
from nvflare_plugins.site.flare_boundary import RESOURCES
from nvflare_plugins.site.policy import SitePolicy

KEPT = ("registry", "ledgers", "runs")
"""Keys of the policy: what a site keeps over jobs."""
_IN_CONTAINER = PurePosixPath("/var/tmp/nvflare/workspace")  # noqa: S108  # where FLARE mounts a kit


class Runtime(Enum):
    """Where FLARE starts jobs; the values are FLARE's own words."""

    PROCESS = "process"
    DOCKER = "docker"
    KUBERNETES = "k8s"
    SLURM = "slurm"


def runtime_of(workspace: Path) -> Runtime:
    """Return where FLARE starts the jobs of a kit, by its launcher; slurm without a sandbox counts as processes."""
    for path in (workspace / RESOURCES, workspace / f"{RESOURCES}.default"):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        components = document.get("components") if isinstance(document, dict) else None
        for component in components if isinstance(components, list) else ():
            if isinstance(component, dict):
                for runtime in (Runtime.DOCKER, Runtime.KUBERNETES, Runtime.SLURM):
                    if component.get("id") == f"{runtime.value}_launcher":
                        return runtime if _is_apart(component) else Runtime.PROCESS
        return Runtime.PROCESS
    return Runtime.PROCESS


def is_prepared(workspace: Path) -> bool:
    """Return whether ``nvflare deploy prepare`` has written this kit, so that it will delete it the next time."""
    return runtime_of(workspace) is not Runtime.PROCESS or (workspace / "startup" / "start_slurm.sh").is_file()


def _is_apart(component: dict[str, object]) -> bool:
    args = component.get("args")
    return not (isinstance(args, dict) and args.get("sandbox", "") == "none")


def site_name(workspace: Path) -> str:
    """Return a site's name by its startup kit, whatever the folder is called that the kit lies in."""
    try:
        document = json.loads((workspace / "startup" / "fed_client.json").read_text(encoding="utf-8"))
        name = document["client"]["fqsn"]
    except (OSError, ValueError, KeyError, TypeError):
        return workspace.name
    if not isinstance(name, str) or not name or name.endswith(f".{workspace.name}"):
        return workspace.name
    return name


class Mounts:
    """What the containers of a kit's jobs see of the machine, after ``local/study_runtime.yaml``.

    Raises:
        ConfigurationError: the file is there and FLARE could not read it.
    """

    def __init__(self, workspace: Path) -> None:
        self._runtime = runtime_of(workspace)
        path = study_runtime_file_path(str(workspace))
        studies = {}
        if os.path.isfile(path):
            try:
                studies = load_study_runtime_file(path, self._runtime.value)
            except ValueError as error:
                raise ConfigurationError(f"{path} cannot be read: {error}") from None
        self._mounts = [mount for study in studies.values() for mount in study.datasets]

    def of(self, path: Path) -> tuple[Path | None, bool] | None:
        """Return where a path of a job's lies on this machine, and whether a job may write there.

        None where no mount holds it. The place is None on a Kubernetes claim, which only the cluster knows.
        """
        inside = PurePosixPath(os.path.normpath(path))
        for mount in self._mounts:
            if inside.is_relative_to(mount.mount_path):
                rest = inside.relative_to(mount.mount_path)
                place = None if self._runtime is Runtime.KUBERNETES else Path(mount.source) / rest
                return place, not mount.read_only
        return None


def run_gaps(workspace: Path, policy: SitePolicy) -> Iterator[str]:
    """Yield what a job would forget, or not find, where FLARE runs it; nothing where jobs are processes."""
    runtime = runtime_of(workspace)
    if runtime is Runtime.PROCESS:
        return
    yield from memory_gaps(workspace, policy)
    mounts = Mounts(workspace)
    unwritable = [
        key
        for key in (*KEPT, "ledger_heads")
        if not _lies_within(getattr(policy, key), workspace) and not (mounts.of(getattr(policy, key)) or (0, False))[1]
    ]
    if unwritable:
        path = getattr(policy, unwritable[0])
        yield f"{', '.join(unwritable)} are on no mount with mode rw ({path}). {_lines(path, 'rw')}"
    for name, data_set in policy.data_sets.items():
        if mounts.of(data_set.path) is None:
            yield f"data set {name!r} ({data_set.path}) is on no mount. {_lines(data_set.path, 'ro')}"


def memory_gaps(workspace: Path, policy: SitePolicy) -> Iterator[str]:
    """Yield what of a site's memory would be gone when a job's container ends, one clause for all of it."""
    if runtime_of(workspace) is Runtime.PROCESS:
        return
    inside = [key for key in (*KEPT, "ledger_heads") if _lies_within(getattr(policy, key), workspace)]
    if inside:
        yield (
            f"{', '.join(inside)} lie in the workspace, of which nothing outlives the container of a job: the site "
            "would forget what it has released and spent. Give `--keep-in /data/STUDY/DATASET`, a folder that "
            "local/study_runtime.yaml mounts with mode rw"
        )


def check_memory_is_kept(workspace: Path, policy: SitePolicy) -> None:
    """Refuse to run a job whose container would take the site's memory along when it ends.

    Raises:
        ConfigurationError: that is so; the message names the remedy.
    """
    found = list(memory_gaps(workspace, policy))
    if found:
        raise ConfigurationError(
            f"{policy.site}: {'; '.join(found)}. Remedy: `veilboost site-setup DIR --keep-in ...`."
        )


def _lies_within(path: Path, workspace: Path) -> bool:
    return Path(os.path.normpath(path)).is_relative_to(workspace.absolute()) or PurePosixPath(path).is_relative_to(
        _IN_CONTAINER
    )


def _lines(path: Path, mode: str) -> str:
    """Return the lines of ``study_runtime.yaml`` that would mount a path, if it is one that can be mounted."""
    parts = path.parts
    study, data_set = (parts[2], parts[3]) if parts[:2] == ("/", "data") and len(parts) > 4 else ("default", "NAME")
    return (
        f"Name it below /data/STUDY/DATASET and say in local/study_runtime.yaml: studies: {{{study}: {{datasets: "
        f"{{{data_set}: {{source: FOLDER_OR_CLAIM, mode: {mode}}}}}}}}}"
    )
