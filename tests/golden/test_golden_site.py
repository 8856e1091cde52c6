"""What a site remembers as version 0.10.0 wrote it is still read: what it forbids stays forbidden."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from dp_components.ledger import Ledger
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.cli.main import main
from nvflare_plugins.kinds.alignment.align import align_site
from nvflare_plugins.kinds.alignment.job import load_alignment
from nvflare_plugins.kinds.horizontal.site import run_site as run_horizontal_site
from nvflare_plugins.kinds.private_trees.training import run_private_trees_site
from nvflare_plugins.kinds.vertical.model import PassivePart, find_part
from nvflare_plugins.kinds.vertical.site import run_vertical_site
from nvflare_plugins.kinds.vertical_inference.site import run_inference
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.data_refusals import RefusalCount
from nvflare_plugins.site.memory.registry import Registry
from nvflare_plugins.site.memory.released import ReleasedSums
from nvflare_plugins.site.memory.store import Memory, policy_changes
from nvflare_plugins.site.policy import SitePolicy
from tests.golden import site
from tests.golden.jobs import run_job
from tests.golden.site import SITE
from tests.support.federation import Parties, succeed

GOLDEN = Path(__file__).parent
REMEMBERS = GOLDEN / "site_3"


RECORDED = json.loads((GOLDEN / "models" / "manifest.json").read_text())["xgboost"]
needs_its_xgboost = pytest.mark.skipif(
    xgb.__version__ != RECORDED, reason=f"the model that it keeps a part of is of {RECORDED}"
)


def restore(workspace: Path) -> None:
    """Put the site's files in the place of a workspace; git keeps no modes."""
    shutil.rmtree(workspace, ignore_errors=True)
    shutil.copytree(REMEMBERS, workspace)
    for path in workspace.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


@pytest.fixture
def policy(tmp_path: Path) -> SitePolicy:
    restore(tmp_path / SITE)
    return SitePolicy.load(tmp_path / SITE, SITE)


@pytest.fixture(scope="module")
def newcomers(tmp_path_factory: pytest.TempPathFactory) -> Parties:
    return site.federation(tmp_path_factory.mktemp("newcomers"))


def parties_of(newcomers: Parties, tmp_path: Path) -> Parties:
    """Return three sites that remember nothing."""
    shutil.copytree(newcomers.folder, tmp_path / "sites")
    return Parties(tmp_path / "sites", policy=newcomers.policy)


def train(parties: Parties) -> None:
    """Let the sites have the model again whose part the site keeps."""
    run_job(parties, run_vertical_site, site.vertical("columns"), job_id="trained")


def nothing(parties: Parties) -> None:
    """Prepare nothing."""


Run = Callable[[Parties], dict]

FORBIDDEN: dict[str, tuple[Callable[[Parties], None], Run, str]] = {
    "registry": (
        nothing,
        lambda parties: parties.run(run_horizontal_site, site.horizontal(subsample=0.5), "again"),
        "another",
    ),
    "privacy ledger": (
        nothing,
        lambda parties: parties.run(run_private_trees_site, site.private(8.5), "again"),
        "privacy budget",
    ),
    "rows sent": (
        nothing,
        lambda parties: parties.run(run_vertical_site, site.vertical("loans"), "again"),
        "randomised buckets",
    ),
    "alignments": (nothing, lambda parties: parties.run(align_site, site.ALIGN, "again"), "aligned"),
    "predictions": (train, lambda parties: parties.run(run_inference, site.PREDICT, "again"), "answers no more often"),
}


MARKS = {"predictions": needs_its_xgboost}


@pytest.mark.parametrize("memory", [pytest.param(m, marks=MARKS.get(m, [])) for m in FORBIDDEN])
def test_what_it_remembers_is_refused(memory: str, newcomers: Parties, tmp_path: Path) -> None:
    """Among sites that remember nothing it refuses, for its memory: without it the same job runs."""
    prepare, run, text = FORBIDDEN[memory]
    parties = parties_of(newcomers, tmp_path)
    prepare(parties)
    restored = Parties(Path(shutil.copytree(parties.folder, tmp_path / "restored")), policy=parties.policy)
    restore(restored.workspace(SITE))
    refusal = run(restored)[SITE]
    assert isinstance(refusal, Exception) and text in str(refusal), refusal
    succeed(run(parties))


def test_runs_are_remembered_and_the_same_run_may_be_repeated(newcomers: Parties, tmp_path: Path) -> None:
    parties = parties_of(newcomers, tmp_path)
    restore(parties.workspace(SITE))
    registry = Registry.open(SitePolicy.load(parties.workspace(SITE), SITE))
    assert "site-3, horizontal" in registry.describe() and "site-3, again" not in registry.describe()
    succeed(parties.run(run_horizontal_site, site.horizontal(), "again"))
    assert "site-3, horizontal" in registry.describe() and "site-3, again" in registry.describe()


def test_what_was_spent_is_known(policy: SitePolicy) -> None:
    for data_set, epsilon in (("patients", 4.0), ("credit", 3.0)):
        spent = Ledger(policy.ledgers / f"{data_set}.ledger", policy.ledger_heads).spent()
        assert 0.99 * epsilon < spent.epsilon(1e-5) <= epsilon, data_set


def test_released_sums_belong_to_the_rows(policy: SitePolicy) -> None:
    ledger = ReleasedSums(Memory.open(policy), "columns")
    released = ledger.read()
    ids = [f"worker-{number}" for number in range(len(pd.read_parquet(policy.workspace / "columns.parquet")))]
    assert np.array_equal(np.sort(ledger.row_keys(ids)), np.sort(released.keys))
    assert released.sizes.size and (released.sums > 0).all() and (released.split_bits >= 0).all()


def test_the_alignment_still_holds(policy: SitePolicy) -> None:
    context = SiteContext(
        SITE, ("site-1", SITE, "site-3"), "later", b"a" * 16, policy.workspace / "runs", policy, Identity.unsigned(SITE)
    )
    found = load_alignment(context, "aligned", "people")
    ids = pd.read_parquet(policy.workspace / "people.parquet")["id"].to_numpy()
    assert found.n_common == len(found.take(ids)) > 50 and sorted(found.take(ids)) == list(found.take(ids))


def test_parts_of_models_are_read(policy: SitePolicy) -> None:
    for job_id in ("trained", "buckets"):
        part = find_part(policy.workspace / "runs", policy.inputs, job_id, SITE, PassivePart).part
        assert part.columns == ("mean_radius", "mean_area") and part.aliases == ("f0", "f1")
        assert bool(part.table) == (job_id == "trained")


@pytest.mark.parametrize("job_id", ["horizontal", "private", "trained", "predicted", "aligned", "buckets"])
def test_run_records_are_read(job_id: str, policy: SitePolicy) -> None:
    record = RunRecord.read(policy.workspace / "runs" / job_id)
    stored = json.loads((REMEMBERS / "runs" / job_id / "run.json").read_text())
    assert record.job_id == job_id and len(record.rounds) == len(stored["rounds"])
    now = json.loads(json.dumps(record.to_dict()))
    for part in ("rounds", "sections"):  # whose later fields a record of before does not have
        now[part] = [{key: one[key] for key in old} for one, old in zip(now[part], stored[part], strict=True)]
    assert {key: now[key] for key in stored} == stored


def test_refusals_count_for_a_month(policy: SitePolicy) -> None:
    day_s = 86400
    assert RefusalCount(policy, lambda: site.REFUSED_AT_S + day_s).counts() == {"patients": 1, "rows": 1}
    assert RefusalCount(policy, lambda: site.REFUSED_AT_S + 40 * day_s).counts() == {}


def test_a_change_of_the_policy_is_noticed(policy: SitePolicy) -> None:
    path = policy.workspace / "local" / "veilboost.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "min_sites": 9}))
    changed = set(policy_changes(SitePolicy.load(policy.workspace, SITE)))
    # The workspace has moved, and with it all paths.
    moved = {
        "inputs",
        "registry",
        "ledgers",
        "ledger_heads",
        "runs",
        *(f"data_sets.{name}" for name in policy.data_sets),
    }
    assert changed == {"min_sites", "allowed_profiles", *moved}, "one of its profiles was removed since"


def test_the_commands_show_it(policy: SitePolicy, capsys: pytest.CaptureFixture[str]) -> None:
    for command, expected in (("registry", "horizontal"), ("ledger", "patients")):
        assert main([command, str(policy.workspace), "--site", SITE]) == 0
        assert expected in capsys.readouterr().out
