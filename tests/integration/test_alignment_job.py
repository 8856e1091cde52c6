"""The alignment job in FLARE's simulator: three parties with other columns of overlapping rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from jobs import examples
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.kinds.alignment.job import FILE, load_alignment
from nvflare_plugins.recipes.examples import DATA_SETS
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.setup import SetupOptions, set_up
from tests.support.simulator import SITES, Run, completed, run_simulator

JOB = examples.FOLDER / "alignment"


def common_ids(data: Path, name: str) -> list[str]:
    sets = [set(pd.read_csv(data / site / f"{name}.csv")["id"].str.strip()) for site in SITES]
    return sorted(set.intersection(*sets))


def check_positions(run: Run, data: Path) -> None:
    """Every site's positions pick the same people, in the same order."""
    for site in SITES:
        policy = SitePolicy.load(run.workspace / site, site)
        runs = run.site(site).parent
        context = SiteContext(site, SITES, "later", b"a" * 16, runs, policy, Identity.unsigned(site))
        for name in DATA_SETS:
            found = load_alignment(context, "simulate_job", name)
            own = pd.read_csv(data / site / f"{name}.csv")["id"].str.strip().to_numpy()
            assert found.take(own).tolist() == common_ids(data, name)
            assert found.n_common > 100 and found.n_rows == len(own) > found.n_common


def files_without_data(run: Run) -> list[Path]:
    return [path for path in run.workspace.rglob("*") if path.is_file()]


@pytest.mark.sim
@pytest.mark.slow
def test_three_parties_align_two_data_sets(tmp_path: Path) -> None:
    data = tmp_path / "data"
    run = completed(run_simulator(JOB, tmp_path / "ws", SetupOptions(policy=examples.write_data("alignment", data))))
    check_positions(run, data)
    for site in SITES:
        assert (run.site(site) / FILE).stat().st_mode & 0o777 == 0o600
        assert "Aligned rows" in (run.site(site) / "report.html").read_text()
        assert "breast_columns is aligned" in run.log(site)
    ids = [one.encode() for name in DATA_SETS for one in common_ids(data, name)]
    for path in files_without_data(run):
        content = path.read_bytes()
        assert not any(one in content for one in ids), f"{path.name} holds an id"
    assert ids[0] in (data / "site-1" / "breast_columns.csv").read_bytes()


@pytest.mark.sim
@pytest.mark.slow
def test_repeated_ids_at_one_site_are_everyones_clear_error(tmp_path: Path) -> None:
    wishes = SetupOptions(policy=examples.write_data("alignment", tmp_path / "data"))
    path = tmp_path / "data" / "site-2" / "breast_columns.csv"
    frame = pd.read_csv(path)
    pd.concat([frame, frame.iloc[:1]]).to_csv(path, index=False)
    run = run_simulator(JOB, tmp_path / "ws", wishes)
    assert run.code != 0
    assert run.summary["reason"].startswith("site-2: ") and "holds some id more than once" in run.summary["reason"]
    secret = frame["id"].iloc[0].strip().encode()
    assert not any(secret in path.read_bytes() for path in files_without_data(run))
    assert not list(run.workspace.rglob(FILE))


def test_demo_data_overlap_and_set_up_names_the_id_column(tmp_path: Path) -> None:
    wishes = SetupOptions(policy=examples.write_data("alignment", tmp_path / "data"))
    set_up(tmp_path / "ws", wishes)
    assert SitePolicy.load(tmp_path / "ws", "site-1").data_set("breast_columns").id == "id"
    frames = [pd.read_csv(tmp_path / "data" / site / "breast_columns.csv") for site in SITES]
    names = [set(frame.columns) - {"id"} for frame in frames]
    assert "target" in names[0] and len(set().union(*names)) == sum(map(len, names)) == 31
    assert len({len(frame) for frame in frames}) == 1
    assert not np.array_equal(frames[0]["id"], frames[1]["id"].str.strip())
