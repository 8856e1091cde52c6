"""Settings of all tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

# One thread a process, before anything loads OpenMP: the files of tests that run side by side are the parallelism, and
# threads that wait for a core spin on it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# This process and those that tests start keep what they compile, or each compiles the product and all tests again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Files in memory where there is room: the tests write thousands durably, and a disk takes milliseconds for each.
_IN_MEMORY = "/dev/shm"  # noqa: S108 - the tests make folders of their own there
if "TMPDIR" not in os.environ and os.access(_IN_MEMORY, os.W_OK) and shutil.disk_usage(_IN_MEMORY).free > 4 << 30:
    os.environ["TMPDIR"] = tempfile.tempdir = _IN_MEMORY

import nvflare.apis.fl_component  # noqa: E402, F401 - looks through all modules there are: later it would take longer
import pytest  # noqa: E402 - after the settings of the process
from hypothesis import HealthCheck, settings  # noqa: E402

# A test is red because something is wrong, not because the machine is busy or the dice fell so: times are no property
# here, and the examples are the same in every run. HYPOTHESIS_PROFILE=explore draws others each time. The quick suite
# tries a quarter of them, as tests.support.examples says.
_SLOW_MACHINES = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, max_examples=25, **_SLOW_MACHINES)
settings.register_profile("thorough", derandomize=True, **_SLOW_MACHINES)
settings.register_profile("explore", **_SLOW_MACHINES)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# An installation maps this folder to its name; here it is the checkout's, whatever is installed.
_VEILBOOST = Path(__file__).parents[1] / "nvflare_plugins" / "veilboost"
_SPEC = importlib.util.spec_from_file_location(
    "veilboost", _VEILBOOST / "__init__.py", submodule_search_locations=[str(_VEILBOOST)]
)
assert _SPEC is not None and _SPEC.loader is not None
sys.modules["veilboost"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sys.modules["veilboost"])


_SLOW = frozenset(f"tests/{line}" for line in Path(__file__).with_name("slow.txt").read_text().splitlines())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage in what is loaded and collected: it stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have the tests that slow.txt names run with the slow ones: long, and near to others that stay quick."""
    for item in items:
        if item.nodeid in _SLOW:
            item.add_marker(pytest.mark.slow)
    if not any("::" in one for one in config.args):
        files = {item.nodeid.partition("::")[0] for item in items}
        gone = {one for one in _SLOW if one.partition("::")[0] in files}.difference(item.nodeid for item in items)
        if gone:
            raise pytest.UsageError(f"tests/slow.txt names tests that are not there: {', '.join(sorted(gone))}")


@pytest.fixture(autouse=True, scope="session")
def _no_trial_start() -> Iterator[None]:
    """Leave out of `site-setup --check` the process that tries a start: it loads all libraries, seconds each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nvflare_plugins.cli.site_setup.start_faults", lambda *of, **named: [])
        yield
