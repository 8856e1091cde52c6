"""Numbers of a kit while no job runs: what is told of processes, certificate, backups and lost jobs."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from nvflare_plugins.cli.main import main
from nvflare_plugins.flare.metrics import MetricsFile, SiteMetrics
from nvflare_plugins.flare.watch import SILENT_S, Watch, processes_of
from nvflare_plugins.site.flare_boundary import Role
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.setup import SetupOptions, set_up
from tests.unit.nvflare_plugins.site.test_site_setup import kit

SITE = "hospital-a"


def process(processes: Path, number: int, *arguments: str, pages: int = 10) -> None:
    folder = processes / str(number)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_bytes("\0".join(["python3", "-u", "-m", *arguments, ""]).encode())
    (folder / "statm").write_text(f"100 {pages} 3 4 0 5 0")


def numbers(folder: Path, stem: str = f"veilboost_{SITE}_kit") -> dict[str, float]:
    lines = (folder / f"{stem}.prom").read_text().splitlines()
    return {
        re.sub(r'who="[^"]*",?', "", line.rpartition(" ")[0]): float(line.rpartition(" ")[2])
        for line in lines
        if not line.startswith("#")
    }


@pytest.fixture
def place(tmp_path: Path) -> Path:
    site = kit(tmp_path / SITE)
    set_up(site, SetupOptions({"credit": str(tmp_path / "credit.csv")}))
    (tmp_path / "metrics").mkdir()
    return site


def test_processes_are_those_that_name_the_kit(tmp_path: Path) -> None:
    mine, other = tmp_path / "site-1", tmp_path / "site-10"
    client = "nvflare.private.fed.app.client.client_train"
    process(tmp_path / "proc", 1, client, "-m", f"{mine}/startup/..", pages=7)
    process(tmp_path / "proc", 2, "nvflare.private.fed.app.client.worker_process", "-m", str(mine))
    process(tmp_path / "proc", 3, client, "-m", str(other))
    process(tmp_path / "proc", 4, "http.server", str(mine))
    (tmp_path / "proc" / "5").mkdir()  # it has ended meanwhile
    found = processes_of(mine, tmp_path / "proc")
    assert sorted(one.is_job for one in found) == [False, True]
    assert {one.resident_bytes for one in found if not one.is_job} == {7 * os.sysconf("SC_PAGE_SIZE")}


def test_a_site_tells_what_an_operator_asks_for(place: Path, tmp_path: Path) -> None:
    watch = Watch(place, Role.SITE, SITE, tmp_path / "metrics", tmp_path / "proc")
    assert watch.look(1e9) == ""
    found = numbers(tmp_path / "metrics")
    assert found["veilboost_kit_up{}"] == 0 and found["veilboost_kit_error{}"] == 0
    assert found['veilboost_kit_disk_free_bytes{folder="ledgers"}'] > 0
    assert not [name for name in found if "backup" in name or "memory" in name]
    Memory.open(SitePolicy.load(place, SITE))
    assert main(["backup", str(place), str(tmp_path / "saved"), "--site", SITE]) == 0
    process(tmp_path / "proc", 1, "nvflare.private.fed.app.client.client_train", "-m", str(place))
    assert watch.look(1e9) == ""
    found = numbers(tmp_path / "metrics")
    assert found["veilboost_kit_up{}"] == 1
    assert found["veilboost_kit_backup_seconds{}"] >= found["veilboost_kit_memory_updated_seconds{}"] - 60


def test_a_policy_that_cannot_be_read_is_a_number_too(place: Path, tmp_path: Path) -> None:
    watch = Watch(place, Role.SITE, SITE, tmp_path / "metrics", tmp_path / "proc")
    (place / "local" / "veilboost.json").write_text("{")
    assert "cannot be read as JSON" in watch.look(1e9)
    found = numbers(tmp_path / "metrics")
    assert found["veilboost_kit_error{}"] == 1 and found["veilboost_kit_up{}"] == 0


def test_a_damaged_ledger_is_told_and_ends_nothing(place: Path, tmp_path: Path) -> None:
    folder = SitePolicy.load(place, SITE).ledgers
    folder.mkdir(parents=True)
    (folder / "credit.ledger").write_text("no ledger\n")
    watch = Watch(place, Role.SITE, SITE, tmp_path / "metrics", tmp_path / "proc")
    assert watch.look(1e9) != "" and numbers(tmp_path / "metrics")["veilboost_kit_error{}"] == 1


def test_a_job_whose_process_was_killed_is_told_as_lost(place: Path, tmp_path: Path) -> None:
    folder, clock = tmp_path / "metrics", [1000.0]
    for job in ("killed", "alive"):
        clock[0] = 1000.0 if job == "killed" else 1000.0 + SILENT_S
        labels = (("site", SITE), ("job_id", job))
        SiteMetrics(MetricsFile(folder, SITE, job), labels, 1, lambda: (), clock=lambda: clock[0]).write()
    watch = Watch(place, Role.SITE, SITE, folder, tmp_path / "proc")
    states = {}
    for _ in range(2):  # the second time changes nothing
        watch.look(1001.0 + SILENT_S)
        for job in ("killed", "alive"):
            found = numbers(folder, f"veilboost_{SITE}_{job}")
            states[job] = [
                re.findall('state="([a-z]+)"', name)[0] for name, value in found.items() if "state" in name and value
            ]
        assert states == {"killed": ["lost"], "alive": ["running"]}


def test_the_command(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VEILBOOST_METRICS", raising=False)
    assert main(["watch", str(place), "--once"]) == 1 and "VEILBOOST_METRICS" in capsys.readouterr().err
    monkeypatch.setenv("VEILBOOST_METRICS", str(tmp_path / "metrics"))
    assert main(["watch", str(place), "--once"]) == 0 and "all numbers" in capsys.readouterr().out
    assert main(["watch", str(tmp_path / "metrics"), "--once"]) == 1
    capsys.readouterr()
    server = kit(tmp_path / "server", "server")
    shutil.rmtree(server / "local", ignore_errors=True)
    assert main(["watch", str(server), "--once"]) == 0
    assert numbers(tmp_path / "metrics", "veilboost_server_kit")["veilboost_kit_up{}"] == 0
