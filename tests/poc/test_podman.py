"""Real containers: images of the Dockerfile, a server and three sites as compose.yml has them, and their jobs.

They share a network without any line to the outside, so that podman may run without root: ``PODMAN="runuser -u NAME --
podman"``, say. The base image is the one that is there, or else what debootstrap makes of Debian's packages.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from poc_workspace.run_poc import ADMIN, SITES
from tests.poc.test_lost_sites import ROUNDS, WAITING
from tests.test_containers import COMPOSE, FOLDER, ROOT, USER

PODMAN = shlex.split(os.environ.get("PODMAN", "podman"))
BASE = "debian:bookworm-slim"
PROJECT = "/kept/project/veilboost_containers/prod_00"
DATA_SETS = {"breast": "/data/breast_train.csv", "breast_test": "/data/breast_test.csv"}
BUILD_S, JOB_S = 3600, 900

pytestmark = [
    pytest.mark.poc,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(PODMAN[0]) is None, reason=f"{PODMAN[0]} is not installed"),
]


def podman(*arguments: str | Path, timeout_s: float = 300, **options: Any) -> str:
    """Run podman; return what it prints."""
    command = [*PODMAN, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False, cwd="/", **options)
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout.decode()


def has(kind: str, name: str) -> bool:
    return subprocess.run([*PODMAN, kind, "exists", name], check=False, cwd="/").returncode == 0


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """A folder that another user, as whom podman may run, can read."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def give_base(folder: Path) -> None:
    """Make the image that the Dockerfile begins with, where no registry has it."""
    if has("image", BASE) or has("image", f"docker.io/library/{BASE}"):
        return
    if shutil.which("debootstrap") is None:
        pytest.skip(f"there is no image {BASE}, and debootstrap is not installed")
    root, archive = folder / "root", folder / "base.tar"
    options = {"capture_output": True, "check": True, "timeout": BUILD_S}
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", root], **options)  # noqa: S607
    left_out = [f"--exclude=./{name}/*" for name in ("dev", "proc", "sys")]
    subprocess.run(["tar", "-C", root, *left_out, "-cf", archive, "."], **options)  # noqa: S607
    shutil.rmtree(root)
    archive.chmod(0o644)
    podman("import", archive, f"localhost/{BASE}")


def certificates(folder: Path) -> list[str]:
    """Return options by which pip in a build knows the certificates that it knows here."""
    known = os.environ.get("PIP_CERT")
    if known is None:
        return []
    (folder / "pip.conf").write_text("[global]\ncert = /run/known.pem\n")
    shutil.copy(known, folder / "known.pem")
    return ["-v", f"{folder}/pip.conf:/etc/pip.conf:ro", "-v", f"{folder}/known.pem:/run/known.pem:ro"]


@pytest.fixture(scope="module")
def images(shared: Path) -> None:
    """Build the images of a site and of the server from what the Dockerfile copies."""
    give_base(shared)
    context = shared / "context"
    for name in [".dockerignore", "Dockerfile", *re.findall(r"(?m)^!(.*)$", (ROOT / ".dockerignore").read_text())]:
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, context / name)
    subprocess.run(["chmod", "-R", "a+rX", context], check=True)  # noqa: S607
    for role in ("site", "server"):
        options = ["--pull=never", "--network=host", *certificates(shared), "--target", role, "-t", f"veilboost-{role}"]
        podman("build", *options, context, timeout_s=BUILD_S)


class Containers:
    """A server and three sites; all that they have is in volumes of a name of their own."""

    def __init__(self, folder: Path) -> None:
        self._source = shutil.copytree(FOLDER, folder / "source")
        self._jobs = folder / "jobs"
        shutil.copytree(ROOT / "jobs" / "horizontal_masks", self._jobs / "horizontal_masks")
        (waiting,) = shutil.copytree(self._jobs / "horizontal_masks", self._jobs / "waiting").glob(
            "*/config/*server.json"
        )
        config = json.loads(waiting.read_text())
        config["workflows"][0]["args"]["job"].update(WAITING)
        waiting.write_text(json.dumps(config))
        self._hosts = folder / "hosts"  # containers that share a network do not share it
        self._hosts.write_text("127.0.0.1 localhost server\n")
        subprocess.run(["chmod", "-R", "a+rX", self._source, self._jobs, self._hosts], check=True)  # noqa: S607
        self.name = f"veilboost-test-{secrets.token_hex(4)}"
        self._volumes: set[str] = set()

    def volume(self, name: str, at: str, mode: str = "rw") -> list[str]:
        """Return the option that mounts a volume; a new one is owned as the folder in the image is."""
        self._volumes.add(f"{self.name}-{name}")
        return ["-v", f"{self.name}-{name}:{at}:{mode}"]

    def once(self, *arguments: str, mounts: list[str] | None = None) -> str:
        """Run a command in a container of the site's image, without a network."""
        return podman("run", "--rm", "--network=none", *(mounts or []), "veilboost-site", *arguments)

    @property
    def _network(self) -> list[str]:
        """Options of the network that a container which only sleeps holds for all others, while these come and go."""
        return [f"--network=container:{self.name}-network", "-v", f"{self._hosts}:/etc/hosts:ro"]

    def prepare(self) -> None:
        """Provision, and set every site and the server up (steps 2 and 3 of CONTAINERS.md)."""
        home = self.volume("home", "/kept")
        project = ["-v", f"{self._source}:/source:ro"]
        command = "nvflare provision -p /source/project.yml -w /kept/project --force"
        self.once(*command.split(), mounts=[*home, *project])
        self.once("veilboost", "site-setup", "/kept/example", "--example", mounts=home)
        for name in ("server", *SITES, ADMIN):
            kit = self.volume(f"kit-{_plain(name)}", "/workspace")
            self.once("cp", "-a", f"{PROJECT}/{name}/.", "/workspace/", mounts=[*home, *kit])
        for site in SITES:
            data = self.volume(f"data-{site}", "/workspace")
            self.once("cp", "-a", f"/kept/example/local/example_data/{site}/.", "/workspace/", mounts=[*home, *data])
            sets = [word for name, path in DATA_SETS.items() for word in ("--data-set", f"{name}={path}")]
            kit = [*self.volume(f"kit-{site}", "/kit"), *self.volume(f"data-{site}", "/data", "ro")]
            self.once("veilboost", "site-setup", "/kit", *sets, "--keep-in", "/kept", mounts=kit)
        self.once("veilboost", "site-setup", "/kit", mounts=self.volume("kit-server", "/kit"))
        name = ["--name", f"{self.name}-network", "--network=none"]
        podman("run", "--detach", *name, "veilboost-server", "sleep", "infinity")

    def start(self, service: str) -> None:
        """Start a service of compose.yml; its mounts are volumes here."""
        told = COMPOSE["services"][service]
        mounts = [text.rpartition("}")[2].split(":") for text in told["volumes"]]
        options = []
        for source, at, *mode in mounts:
            own = {"/kit": f"kit-{service}", "/data": f"data-{service}"}.get(at, f"{_plain(source)}-{service}")
            options += self.volume(own, at, (mode or ["rw"])[0])
        environment = [f"--env={name}={value}" for name, value in told["environment"].items()]
        name = ["--name", f"{self.name}-{service}", *self._network]
        podman("run", "--detach", *name, *hardened(told), *environment, *options, told["image"])

    def console(self, command: str) -> str:
        """Run an administrator's command; the jobs' folder is copied, since FLARE signs it in place."""
        options = [*self.volume(f"kit-{_plain(ADMIN)}", "/admin"), "-v", f"{self._jobs}:/jobs:ro"]
        name = [*self._network, *hardened(COMPOSE["services"]["console"])]
        shell = f"cp -r /jobs/* /tmp/ && cd /tmp && {command} --startup-kit /admin"
        return podman("run", "--rm", *name, *options, "veilboost-site", "bash", "-c", shell)

    def run(self, job: str) -> str:
        """Submit a job; return its id."""
        said = self.console(f"nvflare --format json job submit -j /tmp/{job}")
        return str(re.findall(r'"job_id": *"([0-9a-f-]{36})"', said)[-1])

    def ended(self, job_id: str) -> str:
        """Wait for a job's end; return the line in which the console lists it."""
        deadline = time.monotonic() + JOB_S
        while "FINISHED" not in (line := self.listed(job_id)):
            assert time.monotonic() < deadline, line
            time.sleep(5)
        return line

    def listed(self, job_id: str) -> str:
        lines = self.console("nvflare job list").splitlines()
        return next((line for line in lines if job_id in line), "")

    def inside(self, service: str, *command: str) -> str:
        return podman("exec", f"{self.name}-{service}", *command)

    def log(self, service: str, job_id: str) -> str:
        return self.inside(service, "bash", "-c", f"cat /workspace/{job_id}/log.txt || true")

    def wait_for(self, pattern: str, least: int, service: str, job_id: str) -> None:
        """Wait until the largest number that a pattern finds in a job's log is not below ``least``."""
        deadline = time.monotonic() + JOB_S
        while max(map(int, re.findall(pattern, self.log(service, job_id))), default=0) < least:
            assert time.monotonic() < deadline, self.log(service, job_id)[-3000:]
            time.sleep(1)

    def model(self, job_id: str) -> str:
        """Return the hash of the model that all sites have."""
        path = "veilboost_runs/{}/model.json"
        commands = {site: f"sha256sum < /kept/{site}/{path.format(job_id)}" for site in SITES}
        (one,) = {self.inside(site, "bash", "-c", command) for site, command in commands.items()}
        return one

    def end(self) -> None:
        for service in (*SITES, "server", "network"):
            subprocess.run([*PODMAN, "rm", "-f", "-v", "-t", "10", f"{self.name}-{service}"], check=False, cwd="/")
        subprocess.run([*PODMAN, "volume", "rm", "-f", *sorted(self._volumes)], check=False, cwd="/")


def hardened(service: dict[str, Any]) -> list[str]:
    """Return podman's options for what a service of compose.yml says of root file system, rights and memory."""
    assert service["read_only"] is True
    options = ["--read-only", *(f"--cap-drop={one}" for one in service["cap_drop"])]
    options += [f"--security-opt={one}" for one in service["security_opt"]]
    return options + [f"--tmpfs={one}" for one in service["tmpfs"]]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9-]", "-", name.lower()).strip("-")


@pytest.fixture
def containers(images: None, shared: Path) -> Iterator[Containers]:
    found = Containers(shared)
    yield found
    found.end()


def test_a_server_and_three_sites_train_in_containers(containers: Containers) -> None:
    containers.prepare()
    for service in ("server", *SITES):
        containers.start(service)
    deadline = time.monotonic() + JOB_S
    while not all("Successfully registered client" in podman("logs", f"{containers.name}-{one}") for one in SITES):
        assert time.monotonic() < deadline, podman("logs", f"{containers.name}-server")[-3000:]
        time.sleep(3)
    job_id = containers.run("horizontal_masks")
    line = containers.ended(job_id)
    assert "FINISHED:COMPLETED" in line, (line, [containers.log(site, job_id)[-2000:] for site in SITES])
    assert containers.model(job_id)
    for site in SITES:
        assert containers.inside(site, "id", "-u").strip() == str(USER)
        assert job_id in containers.inside(site, "veilboost", "registry", "/workspace", "--site", site)
        containers.inside(site, "python3", "-I", "/opt/veilboost/health.py")
        with pytest.raises(AssertionError, match="Read-only file system"):
            containers.inside(site, "touch", "/opt/veilboost/written")
    whole = containers.run("waiting")
    assert "FINISHED:COMPLETED" in containers.ended(whole)
    died = containers.run("waiting")
    for number, how in enumerate((["restart"], ["kill", "start"]), start=2):
        containers.wait_for(r"round (\d+) of", ROUNDS * (number - 1) // 5, "site-3", died)
        ended = time.monotonic()
        for command in how:
            podman(command, f"{containers.name}-server")
        containers.wait_for(r"in attempt (\d+) of the job", number, "site-3", died)
        print(f"attempt {number} began {time.monotonic() - ended:.0f} s after {' and '.join(how)} of the server")
    assert "FINISHED:COMPLETED" in containers.ended(died)
    assert containers.model(died) == containers.model(whole)
