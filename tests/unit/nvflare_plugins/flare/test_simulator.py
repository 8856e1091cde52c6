"""FLARE's simulator with forked sites: what is forked, what is not, and how a site's end is seen."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sites are forked on Linux alone")


def site_main() -> None:
    """Stand in for FLARE's: write what the process has, and end as its name says."""
    import os
    import signal

    import numpy as np

    from he_processors.randomness import OS_RANDOMNESS

    name, folder = sys.argv[sys.argv.index("--client") + 1], Path(sys.argv[sys.argv.index("-o") + 1])
    facts = (os.environ.get("SITE"), os.getsid(0) == os.getpid(), OS_RANDOMNESS.bytes(8).hex(), np.random.random())
    (folder / f"{name}.txt").write_text(" ".join(map(str, facts)))
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "stays":
        time.sleep(600)
    sys.exit(7 if name == "fails" else 0)


def run_sites(folder: str, names: list[str]) -> list[object]:
    """Fork sites, in a process of its own, as FLARE's runner asks for them; return how each has ended."""
    import pandas  # noqa: F401  # which sites find imported, and NumPy's state with it
    from nvflare.fuel.f3.mpm import MainProcessMonitor

    from nvflare_plugins.flare import simulator

    MainProcessMonitor.run = classmethod(lambda cls, **options: site_main())
    forks = simulator.Forks()
    ends: list[object] = []
    for name in names:
        options = ["-o", folder, "--client", name, "--logging_config", "l", "--token", "t", "--port", "1"]
        command = [sys.executable, "-m", simulator.WORKER, *options, "--parent_pid", "1", "--decomposer_module", "m"]
        site = forks.start(command, {"SITE": name}, shell=False)
        assert isinstance(site, simulator.Site)
        if name == "stays":
            with pytest.raises(subprocess.TimeoutExpired):
                site.wait(0.2)
            assert site.poll() is None
            site.terminate()
        ends.append(site.wait(60))
        site.kill()  # which has ended: nothing
    other = forks.start([sys.executable, "-c", "raise SystemExit(5)"], {})
    assert isinstance(other, subprocess.Popen)
    ends.append(other.wait())
    forks.close()
    return ends


NAMES = ["ends", "fails", "killed", "stays"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[object]]]:
    folder = tmp_path_factory.mktemp("sites")
    with processes().Pool(1) as pool:
        yield folder, pool.apply(run_sites, (str(folder), NAMES))


def test_a_sites_end_is_seen_as_that_of_any_process(ended: tuple[Path, list[object]]) -> None:
    assert ended[1] == [0, 7, -9, -15, 5]


def test_each_site_has_its_own_settings_session_and_randomness(ended: tuple[Path, list[object]]) -> None:
    facts = [(ended[0] / f"{name}.txt").read_text().split() for name in NAMES]
    assert [fact[:2] for fact in facts] == [[name, "True"] for name in NAMES]
    for drawn in zip(*(fact[2:] for fact in facts), strict=True):
        assert len({*drawn}) == len(NAMES), "NumPy's own state, too, which a site's reader may draw by"


def test_what_is_imported_beforehand_starts_no_thread() -> None:
    code = (
        "import importlib, threading\nfrom nvflare_plugins.flare.simulator import PRELOADED\n"
        "for name in PRELOADED: importlib.import_module(name)\nprint(threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_a_job_that_brings_code_starts_python_anew(tmp_path: Path) -> None:
    from nvflare_plugins.flare import simulator

    assert simulator._brings_code({"PYTHONPATH": str(tmp_path)})
    assert not simulator._brings_code(
        {"PYTHONPATH": f"{tmp_path / 'none'}:{sys.path[-1]}"}
    ) and not simulator._brings_code({})
