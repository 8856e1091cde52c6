"""Images, compose file, Kubernetes example, dashboard and their page agree with each other and with the code."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import yaml
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobProcessArgs
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils.class_utils import instantiate_class

from nvflare_plugins.cli.main import COMMANDS
from nvflare_plugins.flare.metrics import FOLDER_VARIABLE, MetricsFile, ServerMetrics, SiteMetrics
from nvflare_plugins.site.setup import SetupOptions, set_up
from tests.generated_tables import metrics
from tests.support.provisioning import provision
from tests.unit.nvflare_plugins.site.test_setup_of_prepared_kits import prepared

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "poc_workspace" / "containers"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PAGE = (ROOT / "jobs" / "CONTAINERS.md").read_text()
COMPOSE = yaml.safe_load((FOLDER / "compose.yml").read_text())
MANIFESTS = [one for path in sorted((FOLDER / "kubernetes").glob("*.yml")) for one in yaml.safe_load_all(path.open())]
CLUSTER = FOLDER / "dask_workers" / "cluster.yml"
DEPLOYMENTS = [one for one in MANIFESTS if one["kind"] == "Deployment"]
USER = 10001
_METRIC = re.compile(r"veilboost_(?:site|server|kit)_[a-z_]+")


def health() -> Any:
    spec = importlib.util.spec_from_file_location("health", FOLDER / "health.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return what a service of the compose file mounts: target -> "ro" or "rw"."""
    parts = [text.replace(":?", "?").rsplit("}", 1)[-1].split(":") for text in service.get("volumes", ())]
    return {part[1]: (part[2:] or ["rw"])[0] for part in parts}


def made_folders() -> set[str]:
    """Return the folders that the image has for mounts."""
    return set(re.findall(r"(?<=\s)/[a-z/]+", " ".join(re.findall(r"install -d (.*)", DOCKERFILE))))


def dashboard_queries() -> list[str]:
    """Return the dashboard's queries with Grafana's variables filled in."""
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return [text.replace("$site", ".*").replace("$job_id", ".*") for text in found]


def container_commands() -> Iterator[list[str]]:
    """Yield the commands of ours that the page runs in containers."""
    for line in re.findall(r"(?m)^    (.*docker .*)$", PAGE):
        for inner in re.findall(r"(?:veilboost-site|veilboost-server|site-\d|console) (veilboost .*)", line):
            yield shlex.split(inner.partition(";")[0])


def test_the_image_runs_as_a_plain_user_and_keeps_the_compiler_out() -> None:
    stages = re.findall(r"(?m)^FROM (\S+) AS (\S+)$", DOCKERFILE)
    assert {name: base for base, name in stages} == {
        "base": "debian:bookworm-slim",
        "build": "base",
        "runtime": "base",
        "site": "runtime",
        "server": "runtime",
    }
    runtime = DOCKERFILE.partition("AS runtime")[2]
    assert f"USER {USER}:{USER}" in runtime
    assert "gcc" not in runtime + DOCKERFILE.partition("AS build")[0]
    assert re.search(r"(?m)^(ARG|ADD)", DOCKERFILE) is None  # no argument could be a secret in a layer
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"  # what is not named stays out


def test_what_the_build_copies_is_there_and_not_ignored() -> None:
    copied = [w for line in re.findall(r"(?m)^COPY (?!--from)(.*) \S+$", DOCKERFILE) for w in line.split()]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == kept
    assert all((ROOT / name).exists() for name in copied)
    assert os.access(FOLDER / "start", os.X_OK)


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_services_are_hardened(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"] == ["/tmp:mode=1777"]  # noqa: S108
    assert not {"privileged", "user", "cap_add", "network_mode", "pid"} & set(service)
    assert not any("docker.sock" in text for text in service["volumes"])
    if name == "console":
        return
    found = mounts(service)
    assert found["/kit"] == "ro"
    assert found.get("/data", "ro") == "ro"
    assert set(found) <= made_folders(), "a volume gets its owner from the folder in the image"
    assert {"/workspace", "/metrics"} <= set(found)
    assert ("/kept" in found) == name.startswith("site-")
    assert service["environment"] == {FOLDER_VARIABLE: "/metrics"}


def test_volumes_are_declared_and_no_two_sites_share_one() -> None:
    named = [
        text.split(":")[0]
        for service in COMPOSE["services"].values()
        for text in service["volumes"]
        if not text.startswith("$")
    ]
    assert sorted(named) == sorted(COMPOSE["volumes"])


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda one: one["metadata"]["name"])
def test_pods_are_hardened_as_the_image_wants(deployment: dict[str, Any]) -> None:
    spec = deployment["spec"]["template"]["spec"]
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert spec["automountServiceAccountToken"] is False
    pod = spec["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert {pod["runAsUser"], pod["runAsGroup"], pod["fsGroup"]} == {USER}
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {one["name"]: one["value"] for one in container["env"]} == {FOLDER_VARIABLE: "/metrics"}
    places = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {place.replace("/kit/startup", "/kit").replace("/kit/local", "/kit") for place in places} - {
        "/tmp"  # noqa: S108
    } <= made_folders()
    assert all(places[place]["readOnly"] for place in places if place.startswith(("/kit", "/data")))
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert {mount["name"] for mount in places.values()} == set(volumes)
    assert all("secret" in volumes[name] for name in ("startup", "local"))
    claims = {one["metadata"]["name"] for one in MANIFESTS if one["kind"] == "PersistentVolumeClaim"}
    used = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
    assert used - claims <= {"site-1-data"}
    assert f"AS {'server' if deployment['metadata']['name'] == 'server' else 'site'}\n" in DOCKERFILE


def test_one_port_everywhere() -> None:
    project = yaml.safe_load((FOLDER / "project.yml").read_text())
    (server,) = [one for one in project["participants"] if one["type"] == "server"]
    port = server["fed_learn_port"]
    (service,) = [one for one in MANIFESTS if one["kind"] == "Service"]
    assert f"EXPOSE {port}\n" in DOCKERFILE
    assert COMPOSE["services"]["server"]["ports"] == [f"{port}:{port}"]
    assert service["metadata"]["name"] == server["default_host"] == "server"
    assert [one["port"] for one in service["spec"]["ports"]] == [port]
    sites = [one["name"] for one in project["participants"] if one["type"] == "client"]
    assert [name for name in COMPOSE["services"] if name.startswith("site-")] == sites


def test_without_a_kit_the_start_says_so() -> None:
    done = subprocess.run([FOLDER / "start", "flare"], capture_output=True, text=True, check=False)
    if Path("/kit/startup").exists():
        pytest.skip("there is a /kit on this machine")
    assert done.returncode == 1
    assert "Remedy" in done.stderr
    other = subprocess.run([FOLDER / "start", "sh", "-c", "umask"], capture_output=True, text=True, check=False)
    assert other.stdout.strip() == "0077"


def test_health_follows_the_kernels_tables(tmp_path: Path) -> None:
    module = health()
    table = tmp_path / "tcp"
    head = "  sl  local_address rem_address   st tx_queue rx_queue\n"
    table.write_text(head + "   0: 0100007F:1F42 00000000:0000 0A 0\n   1: 0200000A:C350 0300000A:1F42 01 0\n")
    sockets = module.connections((table, tmp_path / "none"))
    assert sockets == [(8002, 0, "0A"), (50000, 8002, "01")]
    document = {"servers": [{"service": {"target": "server:8002"}}]}
    for name, lost in (("fed_client.json", (50000, 8002, "01")), ("fed_server.json", (8002, 0, "0A"))):
        startup = tmp_path / name.partition(".")[0]
        startup.mkdir()
        assert "does not say" in module.problem(startup, sockets)
        (startup / name).write_text(json.dumps(document))
        assert module.problem(startup, sockets) is None
        assert "8002" in module.problem(startup, [one for one in sockets if one != lost])


def written_metrics(folder: Path) -> set[str]:
    """Return the names of all metrics, as the code writes them when there is something of each."""
    site = SiteMetrics(MetricsFile(folder, "s", "j"), (), 1, lambda: ())
    server = ServerMetrics(MetricsFile(folder, "server", "j"), ())
    kit = re.findall(r"\| `(veilboost_kit_[a-z_]+)` \|", metrics("kit"))
    return {*kit, *(family.name for family in (*site._families(), *server._families(0.0)))}


def test_dashboard_and_alerts_ask_for_what_is_written(tmp_path: Path) -> None:
    written = written_metrics(tmp_path)
    alerts = (FOLDER / "alerts.yml").read_text()
    asked = set(_METRIC.findall(" ".join(dashboard_queries()) + alerts))
    assert asked <= written
    of_workers = ("busy", "rows", "rows_total", "rows_read", "sent_bytes_total", "received_bytes_total")
    assert written - asked <= {"veilboost_site_attempt", "veilboost_server_job_state", "veilboost_server_attempt"} | {
        "veilboost_server_updated_seconds",
        "veilboost_server_round",
        "veilboost_kit_job_processes",
        "veilboost_kit_resident_bytes",
        "veilboost_kit_open_reservations",
    } | {f"veilboost_site_worker_{name}" for name in of_workers}
    assert all(name in PAGE for name in written), "the page lists them all"


def test_commands_of_the_page_exist() -> None:
    found = list(container_commands())
    assert len(found) >= 4
    for words in found:
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= {name for one in COMMANDS[words[1]].params for name in one.opts}, words
    for name in re.findall(r"(?:-f|-p) ((?:poc_workspace|/source)\S+)", PAGE):
        assert (ROOT / name.replace("/source", "poc_workspace/containers")).is_file(), name
    assert set(re.findall(r"--target (\S+)", PAGE)) == {"site", "server"}


def run_tool(*command: str | Path, env: dict[str, str] | None = None) -> None:
    """Run a checker that need not be installed."""
    tool = shutil.which(str(command[0]))
    if tool is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(
        [tool, *map(str, command[1:])], capture_output=True, text=True, check=False, env={**os.environ, **(env or {})}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_accepts_the_dockerfiles() -> None:
    run_tool("hadolint", ROOT / "Dockerfile", FOLDER / "dask_workers" / "Dockerfile")


def test_yamllint_accepts_the_documents() -> None:
    run_tool("yamllint", "-s", "-d", "{extends: relaxed, rules: {line-length: {max: 120}}}", FOLDER)


@pytest.mark.parametrize("tool", ["kubeconform", "kubernetes-validate"])
def test_manifests_fit_kubernetes_schemas(tool: str) -> None:
    run_tool(tool, *(["-strict"] if tool == "kubeconform" else ["--strict"]), *(FOLDER / "kubernetes").glob("*.yml"))


def test_kubernetes_accepts_the_policy_of_the_cluster(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yml"
    policy.write_text(yaml.safe_dump(list(yaml.safe_load_all(CLUSTER.read_text()))[1]))
    run_tool("kubernetes-validate", "--strict", policy)


def pod_of_flare(kit: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the pod that FLARE's launcher asks Kubernetes for, and the Secrets, of a job at a prepared site."""
    pod, secrets = {}, []
    cell = SimpleNamespace(get_fqcn=lambda: "site-1", register_request_cb=lambda **_: None)
    datasets = {"rows": {"source": "site-1-data", "mode": "ro"}, "kept": {"source": "site-1-kept", "mode": "rw"}}
    study = {"container": {"image": "veilboost-site"}, "datasets": datasets}
    runtime = {"format_version": 2, "studies": {"default": study}}
    (kit / "local" / "study_runtime.yaml").write_text(yaml.safe_dump(runtime))
    set_up(kit, SetupOptions({"rows": "/data/default/rows/rows.csv"}, keep_in="/data/default/kept"))
    components = {one["id"]: one for one in json.loads((kit / "local" / "resources.json").read_text())["components"]}
    component = components["k8s_launcher"]
    launcher = instantiate_class(component["path"], component["args"])
    launcher.core_v1 = SimpleNamespace(
        create_namespaced_secret=lambda namespace, body: secrets.append(body),
        create_namespaced_pod=lambda namespace, body: pod.update(body),
        patch_namespaced_secret=lambda **_: None,
        read_namespaced_pod=lambda **_: SimpleNamespace(status=SimpleNamespace(phase="Running")),
    )
    context, job_id = FLContext(), str(UUID(int=4 << 76))
    context.set_prop(ReservedKey.IDENTITY_NAME, "site-1", private=False)
    context.set_prop(ReservedKey.ENGINE, SimpleNamespace(cell=cell), private=True)
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(kit), "site-1"), private=True)
    context.set_prop(FLContextKey.ARGS, SimpleNamespace(workspace=str(kit), set=[]), private=True)
    process = {JobProcessArgs.EXE_MODULE: ("-m", "nvflare.private.fed.app.client.worker_process")}
    context.set_prop(FLContextKey.JOB_PROCESS_ARGS, process, private=True)
    launcher.launch_job({"job_id": job_id, "study": "default"}, context)
    return pod, secrets


def test_kubernetes_accepts_what_flares_launcher_asks_for(tmp_path: Path) -> None:
    """A job in a pod of its own, at a site that `nvflare deploy prepare` and `veilboost site-setup` have made."""
    pytest.importorskip("kubernetes", reason="Kubernetes' client, with which FLARE launches jobs, is not installed")
    kit = prepared(provision(FOLDER / "project.yml", tmp_path) / "site-1", "k8s")
    pod, secrets = pod_of_flare(kit)
    (container,) = pod["spec"]["containers"]
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert mounts["/data/default/rows"] is True and mounts["/data/default/kept"] is False
    path = tmp_path / "launched.yml"
    path.write_text(yaml.safe_dump_all([pod, *secrets]))
    run_tool("kubernetes-validate", "--strict", path)


def unknown(schema: dict[str, Any], value: Any, place: str = "") -> Iterator[str]:
    """Yield what Kubernetes would drop: keys that a resource's schema does not have."""
    if isinstance(value, dict) and "properties" in schema:
        for key, inner in value.items():
            if key in schema["properties"]:
                yield from unknown(schema["properties"][key], inner, f"{place}.{key}")
            else:
                yield f"{place}.{key}"
    for inner in value if isinstance(value, list) else ():
        yield from unknown(schema.get("items", {}), inner, f"{place}[]")


def test_the_cluster_fits_the_operators_own_schema() -> None:
    validator = pytest.importorskip("jsonschema")
    spec = importlib.util.find_spec("dask_kubernetes")
    if spec is None or spec.origin is None:
        pytest.skip("dask-kubernetes is not installed")
    (path,) = Path(spec.origin).parent.rglob("crds/daskcluster.yaml")
    (version,) = yaml.safe_load(path.read_text())["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    cluster = next(yaml.safe_load_all(CLUSTER.read_text()))
    validator.validate(cluster, schema)
    assert list(unknown(schema["properties"]["spec"], cluster["spec"])) == []
    broken = {"worker": {**cluster["spec"]["worker"], "replica": 8}}
    assert list(unknown(schema["properties"]["spec"], broken)) == [".worker.replica"], "the control"


def test_the_cluster_is_closed_single_threaded_and_speaks_tls_alone() -> None:
    cluster, policy = yaml.safe_load_all(CLUSTER.read_text())
    name = cluster["metadata"]["name"]
    assert "DASK_DISTRIBUTED__WORKER__MEMORY__SPILL=False" in (ROOT / "jobs" / "CLUSTER.md").read_text()
    for role in ("worker", "scheduler"):
        pod = cluster["spec"][role]["spec"]
        (container,) = pod["containers"]
        assert pod["automountServiceAccountToken"] is False
        assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["fsGroup"]) == (True, USER)
        assert container["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        given = {one["name"]: one["value"] for one in container["env"]}
        assert given["DASK_DISTRIBUTED__WORKER__MEMORY__TARGET"] == "False"
        assert given["DASK_DISTRIBUTED__WORKER__MEMORY__SPILL"] == "False"
        assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
        assert {"--tls-ca-file=/tls/ca.pem", "--tls-cert=/tls/node.pem", "--tls-key=/tls/node.key"} < {
            *container["args"]
        }
    worker = cluster["spec"]["worker"]["spec"]["containers"][0]["args"]
    assert f"tls://{name}-scheduler:8786" in worker
    assert "--nthreads=1" in worker
    assert policy["spec"]["podSelector"]["matchLabels"] == {"dask.org/cluster-name": name}
    allowed = [one["podSelector"]["matchLabels"] for one in policy["spec"]["ingress"][0]["from"]]
    sites = [one["spec"]["template"]["metadata"]["labels"] for one in DEPLOYMENTS]
    assert allowed[0] == policy["spec"]["podSelector"]["matchLabels"]
    assert allowed[1] in sites


@pytest.mark.parametrize("role", ["worker", "scheduler"])
def test_dask_has_the_options_that_manifest_and_guide_give(role: str) -> None:
    command = pytest.importorskip(f"distributed.cli.dask_{role}", reason="the extra `cluster` is not installed").main
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    cluster = next(yaml.safe_load_all(CLUSTER.read_text()))
    args = cluster["spec"][role]["spec"]["containers"][0]["args"]
    assert args[:2] == ["dask", role]
    guide = (ROOT / "jobs" / "CLUSTER.md").read_text().replace("\\\n", " ")
    lines = [*re.findall(rf"(?m)^    dask {role} (.*)$", guide), " ".join(args)]
    assert len(lines) >= 2
    assert {word.partition("=")[0] for line in lines for word in line.split() if word.startswith("--")} <= known


def test_compose_reads_the_file(tmp_path: Path) -> None:
    places = {"VEILBOOST_HOME": str(tmp_path), "VEILBOOST_KITS": str(tmp_path)}
    run_tool("docker-compose", "-f", FOLDER / "compose.yml", "config", env=places)


def test_promtool_accepts_rules_and_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"r{number}", "expr": text} for number, text in enumerate(dashboard_queries())]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run_tool("promtool", "check", "rules", path, FOLDER / "alerts.yml")
    run_tool("promtool", "check", "config", FOLDER / "prometheus.yml")
