"""A site's memory after crashes at each of its writes: what was over is remembered, the rest whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from nvflare_plugins.data.declaration import DataSet, VerticalRules
from nvflare_plugins.data.table import Table
from nvflare_plugins.kinds.vertical.guards import Guard
from nvflare_plugins.site.memory.alignments import AlignmentRegistry
from nvflare_plugins.site.memory.budgets import PredictionBudget
from nvflare_plugins.site.memory.forgetting import Forgetting, Standing, ToForget
from nvflare_plugins.site.memory.registry import Registry, Wanted
from nvflare_plugins.site.memory.released import ReleasedSums, SentRows
from nvflare_plugins.site.memory.store import Memory, load_array, policy_changes
from nvflare_plugins.site.policy import SitePolicy
from tests.support.crashes import WAYS, Say, crash_everywhere
from tests.support.memories import told

SITE = "site-2"
IDS = [f"row-{number}" for number in range(200)]
NAMES = ("a", "b")

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def policy_in(folder: Path) -> SitePolicy:
    document = {"registry": "registry", "ledgers": "ledgers", "vertical": {"predictions_per_row": 1}}
    return SitePolicy.from_dict(document, workspace=folder, site=SITE)


def table() -> Table:
    features = np.random.default_rng(1).normal(size=(300, 2)).astype(np.float32)
    return Table(features, NAMES, ("float",) * 2, (features[:, 0] > 0).astype(np.float32), "y")


def take_part_in_jobs(folder: Path, say: Say) -> None:
    """Everything that a site remembers, each as soon as it is over."""
    policy = policy_in(folder)
    registry = Registry.open(policy)
    run = registry.reserve(
        Wanted(table(), DataSet("d", Path("/d.csv"), "csv")), job_id="job", sites=("a", SITE), parameters=b"p"
    )
    say("reserved")
    registry.plan_cuts(run, NAMES, b"settings")
    say("searched")
    registry.save_cuts(run, {name: np.arange(5, dtype=np.float32) for name in NAMES})
    say("cuts")
    guard = Guard(VerticalRules(), ReleasedSums(Memory.open(policy), "d"), IDS, enforce=False)
    guard.admit_root()
    say("sums")
    PredictionBudget(policy, "d").charge(IDS)
    say("predicted")
    SentRows(policy).note("job", IDS, "d")
    say("sent")
    alignments = AlignmentRegistry.open(policy)
    kept = alignments.reserve({"people": [one.encode() for one in IDS]}, "aligned", ("a", SITE))
    alignments.mark_sent(kept)
    say("aligned")
    alignments.cancel(alignments.reserve({"others": [b"x"]}, "cancelled", ("a", SITE)))
    say("cancelled")
    policy_changes(policy)
    registry.complete(run, 7)
    say("complete")


def all_of_it_is_there_or_none(folder: Path, said: list[str]) -> None:
    memory = Memory.open(policy_in(folder))
    with memory.reading() as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        for number, kind in db.execute("SELECT id, kind FROM arrays").fetchall():
            load_array(db, number, kind)
        owners = "data_versions.row_hashes searched_columns.cuts alignments.ids row_counts.array sent_rows.row_hashes"
        owned = set()
        for table_of, column in (name.split(".") for name in owners.split()):
            found = db.execute(f"SELECT {column} FROM {table_of}")  # noqa: S608 (names above)
            owned |= {number for (number,) in found if number is not None}
        assert {number for (number,) in db.execute("SELECT id FROM arrays")} == owned
    holds = {
        "reserved": "SELECT 1 FROM runs",
        "searched": "SELECT 1 FROM searched_columns",
        "cuts": "SELECT 1 FROM searched_columns WHERE cuts IS NOT NULL",
        "sums": "SELECT 1 FROM row_counts JOIN arrays ON arrays.id = array WHERE name = 'sizes' AND length = 1",
        "predicted": "SELECT 1 FROM row_counts WHERE purpose = 'predictions'",
        "sent": "SELECT 1 FROM sent_rows",
        "aligned": "SELECT 1 FROM alignments WHERE job_id = 'aligned' AND is_sent > 0",
        "complete": "SELECT 1 FROM runs WHERE state = 'complete' AND trees = 7",
    }
    found = [name for name, query in holds.items() if told(memory, query)]
    assert set(said) - {"cancelled"} <= set(found)
    assert found == list(holds)[: len(found)], "in the order in which it came"
    if "cancelled" in said:
        assert told(memory, "SELECT job_id FROM alignments") == [("aligned",)]


EVERY = [pytest.param(1, marks=pytest.mark.slow), 79]


@pytest.mark.parametrize("every", EVERY)
def test_whatever_was_over_is_remembered_and_nothing_by_half(tmp_path: Path, every: int) -> None:
    base, work = tmp_path / "base", tmp_path / "work"
    base.mkdir()
    work.mkdir()
    calls = crash_everywhere(__name__, "take_part_in_jobs", "all_of_it_is_there_or_none", base, work, every)
    assert set(calls) == set(WAYS) and min(calls.values()) > 300


def forget(folder: Path, say: Say) -> None:
    """A request, and the job that fulfils it."""
    policy = policy_in(folder)
    forgetting, registry, spec = Forgetting(policy), Registry.open(policy), DataSet("d", Path("/d.csv"), "csv")
    forgetting.add("d", IDS)
    say("WAITING")
    of_job = {"sites": ("a", SITE), "parameters": b"p"}
    registry.complete(registry.reserve(Wanted(table(), spec), job_id="job", **of_job), 7)
    fewer, whom = table().part(np.arange(300) > 99), ToForget("job", forgetting.queue("d").keys)
    run = registry.reserve(Wanted(fewer, spec, may_grow=True, forgets=whom, is_settled=True), job_id="again", **of_job)
    registry.grown(run, is_enough=True)
    say("LEAVING")
    registry.complete(run, 8)
    say("FORGOTTEN")


def requests_stand_as_was_said(folder: Path, said: list[str]) -> None:
    queue = Forgetting(policy_in(folder)).queue("d")
    assert queue.keys.size in ((len(IDS),) if said else (0, len(IDS)))
    found = set(queue.standing.tolist()) or {Standing.NONE}
    least = Standing[said[-1]] if said else Standing.NONE
    assert len(found) == 1 and least <= found.pop() <= least + 1


@pytest.mark.parametrize("every", [pytest.param(7, marks=pytest.mark.slow), 37])
def test_no_request_to_be_forgotten_is_lost_or_fulfilled_by_half(tmp_path: Path, every: int) -> None:
    base, work = tmp_path / "base", tmp_path / "work"
    base.mkdir()
    work.mkdir()
    assert min(crash_everywhere(__name__, "forget", "requests_stand_as_was_said", base, work, every).values()) > 100
