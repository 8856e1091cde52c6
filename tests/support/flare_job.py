"""A job of any kind under controller and executors in one process; only FLARE itself is stood in for."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.message import Message

from nvflare_plugins.evidence.format import export_name
from nvflare_plugins.evidence.reader import Log, read_log
from nvflare_plugins.flare.attempt import RESULT_FOLDER, SUMMARY_FILE
from nvflare_plugins.flare.controller import TRAIN_TASK
from nvflare_plugins.flare.executor import JobExecutor
from nvflare_plugins.flare.transport import TOPIC_FRAME
from nvflare_plugins.recipes.recipe import JobRecipe
from nvflare_plugins.site.setup import set_up
from tests.support.federation import Parties
from tests.support.flare_network import FakeCell, Network

JOB_ID = "job"


@dataclass
class Finished:
    """How a job ended.

    Attributes:
        job_id: FLARE's.
        reason: why it failed, as the server says; None if it went well.
        reports: what each site's executor returned.
        frames: different pieces of messages that each site sent.
    """

    parties: Parties
    server: Path
    reason: str | None
    reports: dict[str, dict[str, Any]]
    frames: dict[str, int] = field(default_factory=dict)
    job_id: str = JOB_ID

    def folder(self, site: str) -> Path:
        return self.parties.workspace(site) / "veilboost_runs" / self.job_id

    def log(self, site: str) -> Log:
        return read_log(self.folder(site) / "evidence" / export_name(site))

    @property
    def evidence(self) -> Path:
        """Folder at the server with everybody's evidence."""
        return self.server / self.job_id / RESULT_FOLDER / "evidence"

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.server / self.job_id / RESULT_FOLDER / SUMMARY_FILE).read_text())


class _Context(FLContext):
    """What FLARE tells a component of a party about itself."""

    def __init__(self, name: str, root: Path, cell: FakeCell, job_id: str = JOB_ID, **engine: Any) -> None:
        super().__init__()
        workspace = SimpleNamespace(get_root_dir=lambda: str(root), get_run_dir=lambda job_id: str(root / job_id))
        cells = SimpleNamespace(core_cell=cell)
        nothing: dict[str, Any] = {}
        self.engine = SimpleNamespace(
            get_workspace=lambda: workspace,
            get_cell=lambda: cells,
            fire_event=lambda *event: None,
            run_manager=SimpleNamespace(components=nothing),
            **engine,
        )
        self.set_prop(ReservedKey.IDENTITY_NAME, name, private=False)
        self.set_prop(FLContextKey.CURRENT_RUN, job_id, private=False)
        self.set_prop(ReservedKey.ENGINE, self.engine, private=True)


def descriptions(recipe: JobRecipe, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Export a recipe's job folder; return what it says of controller and executor."""
    recipe.export(str(folder))
    job = folder / recipe.name
    server = json.loads(next(job.rglob("config_fed_server.json")).read_text())["workflows"][0]
    executor = json.loads(next(job.rglob("config_fed_client.json")).read_text())["executors"][0]["executor"]
    return server, executor


def components(recipe: JobRecipe, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return controller and executor's description as FLARE builds them from the recipe's job folder."""
    from nvflare.fuel.utils.class_utils import instantiate_class

    server, executor = descriptions(recipe, folder)
    return instantiate_class(server["path"], server["args"]), executor


def run_flare_job(recipe: JobRecipe, parties: Parties, abort_after: int | None = None) -> Finished:
    """Run a recipe's job from its exported folder.

    Args:
        abort_after: so many pieces after its start the last site falls silent and an operator aborts the job.
    """
    from nvflare.fuel.utils.class_utils import instantiate_class

    controller, executor = components(recipe, parties.folder / "exported")
    network, signal, frames = Network(longest_s=0.0002), Signal(), dict.fromkeys(parties.sites, 0)
    known: set[tuple[object, ...]] = set()  # pieces: on a busy machine some are sent again, and count once
    server = parties.folder / "server"
    for root in (server, *(parties.workspace(site) for site in parties.sites)):
        set_up(root)

    def rule(origin: str, topic: str, message: Message) -> int:
        site = origin.split(".")[0]
        if topic != TOPIC_FRAME:
            return 1
        piece = (site, *message.headers["veilboost"])
        frames[site] += piece not in known
        known.add(piece)
        if abort_after is None or site != parties.sites[-1] or frames[site] <= abort_after:
            return 1
        signal.trigger(True)
        return 0

    network.rule = rule
    clients = [SimpleNamespace(name=site, token=site, get_fqcn=lambda site=site: site) for site in parties.sites]
    context = _Context("server", server, FakeCell(network, f"server.{JOB_ID}"), get_clients=lambda: clients)
    said: list[str] = []
    reports: dict[str, dict[str, Any]] = {}
    threads: list[threading.Thread] = []

    def at_site(site: str, task: Any) -> None:
        component: JobExecutor = instantiate_class(executor["path"], executor["args"])
        own = _Context(site, parties.workspace(site), FakeCell(network, f"{site}.{JOB_ID}", site))
        reply = component.execute(TRAIN_TASK, Shareable(json.loads(json.dumps(task.data))), own, signal)
        reports[site] = dict(reply)
        client_task = SimpleNamespace(client=SimpleNamespace(name=site), result=reply)
        task.result_received_cb(client_task, context)

    def broadcast(task: Any, **_: Any) -> None:
        # FLARE registers every site's cell before the task goes out.
        for site in parties.sites:
            threads.append(threading.Thread(target=at_site, args=(site, task)))
            threads[-1].start()

    controller._engine, controller._task_check_period = context.engine, 0.02
    controller.broadcast, controller.cancel_task = broadcast, lambda task: None
    controller.system_panic = lambda reason, fl_ctx: said.append(reason)
    controller.control_flow(signal, context)
    for thread in threads:
        thread.join()
    network.settle()
    return Finished(parties, server, said[0] if said else None, reports, frames)
