"""The contract of profiles of sums: every built-in one, a plugin's, and that each breach of it is noticed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from he_processors.errors import VeilBoostError
from nvflare_plugins.conformance.sums import SumProfileContract
from nvflare_plugins.pooled.processors import BUILT_IN, SumProfile
from nvflare_plugins.wire.envelope import Codec
from tests.support.plugin_package.acme_veil.masks import PROFILE, AcmeMasks, _stream
from tests.support.plugins import install

ROOT = Path(__file__).resolve().parents[2]


class TestMasks(SumProfileContract):
    profile = BUILT_IN["masks"]


class TestBfv(SumProfileContract):
    profile = BUILT_IN["bfv"]
    n_sites = (2, 3)


class TestCkks(SumProfileContract):
    profile = BUILT_IN["ckks"]
    n_sites = (2, 3)


class TestPlugin(SumProfileContract):
    profile = PROFILE


class Unblinded(AcmeMasks):
    """The server reads every sum."""

    def protect(self, integers, label, *, wide=False):
        payload = super().protect(integers, label, wide=wide)
        if self._context.rank:
            return payload
        return (np.frombuffer(payload, "<u8") - _stream(self._context.group_key(), label)).tobytes()

    def reveal(self, payload, label, *, wide=False):
        return np.frombuffer(payload, "<i8").copy()


class Repeating(AcmeMasks):
    """All messages of a length have one mask."""

    def protect(self, integers, label, *, wide=False):
        self._last_counter = -1
        return super().protect(integers, replace(label, counter=0), wide=wide)

    def reveal(self, payload, label, *, wide=False):
        return super().reveal(payload, replace(label, counter=0), wide=wide)


class Forgetting(AcmeMasks):
    """Masks a message as often as it is asked to."""

    def protect(self, integers, label, *, wide=False):
        self._last_counter = -1
        return super().protect(integers, label, wide=wide)


class Clear(AcmeMasks):
    """No masks at all."""

    def protect(self, integers, label, *, wide=False):
        return integers.astype("<i8").tobytes()

    def reveal(self, payload, label, *, wide=False):
        return np.frombuffer(payload, "<i8").copy()


class Narrow(AcmeMasks):
    """Sums modulo 2^32."""

    def reveal(self, payload, label, *, wide=False):
        return super().reveal(payload, label, wide=wide).astype(np.int32).astype(np.int64)


class Compressing(AcmeMasks):
    """Messages that the server cannot add."""

    def protect(self, integers, label, *, wide=False):
        return super().protect(integers, label, wide=wide)[:-1]


class Hoarding(AcmeMasks):
    """Keeps its keys beyond the attempt."""

    def __init__(self, context):
        super().__init__(context)
        keys = {peer: context.pair_key(peer) for peer in range(context.world) if peer != context.rank}
        group = context.group_key()
        self._context = SimpleNamespace(
            rank=context.rank, world=context.world, pair_key=keys.get, group_key=lambda: group
        )


BREACHES = [
    (Unblinded, "test_the_server_reads_neither_contribution_nor_sum"),
    (Clear, "test_the_server_reads_neither_contribution_nor_sum"),
    (Repeating, "test_the_server_reads_neither_contribution_nor_sum"),
    (Clear, "test_no_two_sites_and_no_two_attempts_share_their_masks"),
    (Clear, "test_a_message_is_protected_once"),
    (Clear, "test_nothing_is_protected_after_the_session"),
    (Forgetting, "test_a_message_is_protected_once"),
    (Narrow, "test_sums_are_exact"),
    (Narrow, "test_sums_are_exact_up_to_the_capacity"),
    (Narrow, "test_wide_sums_are_exact"),
    (Narrow, "test_a_long_message_is_summed"),
    (Compressing, "test_its_messages_are_words"),
    (Hoarding, "test_nothing_is_protected_after_the_session"),
]


@pytest.mark.parametrize(("processor", "test"), BREACHES, ids=lambda part: getattr(part, "__name__", part))
def test_a_breach_is_noticed(processor: type, test: str) -> None:
    contract = SumProfileContract()
    contract.profile = replace(PROFILE, open=processor)
    with pytest.raises((AssertionError, VeilBoostError)):
        getattr(contract, test)()


@pytest.mark.parametrize(
    "changes",
    [
        {"codec": Codec.MASKED},
        {"capacity_bits": 8},
        {"statement": replace(PROFILE.statement, server_alone="")},
        {"statement": replace(PROFILE.statement, notes=("x\n",))},
        {"statement": "trust me"},
    ],
)
def test_a_profile_that_says_something_unusable_is_noticed(changes: dict) -> None:
    contract = SumProfileContract()
    contract.profile = replace(PROFILE, **changes)
    with pytest.raises(AssertionError):
        contract.test_it_says_what_it_is()


def test_an_author_with_only_the_packages_can_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this repository's tests is within reach, and one test of a broken plugin is red."""
    install(tmp_path / "packages", monkeypatch)
    for name in ("nvflare_plugins", "he_processors", "dp_components"):
        (tmp_path / "packages" / name).symlink_to(ROOT / name)
    (tmp_path / "test_acme.py").write_text(
        "from acme_veil.masks import PROFILE, AcmeMasks\n"
        "from dataclasses import replace\n"
        "from nvflare_plugins.conformance.sums import SumProfileContract\n"
        "class TestAcme(SumProfileContract):\n    profile = PROFILE\n    n_sites = (2,)\n"
        "class Clear(AcmeMasks):\n    def protect(self, integers, label, wide=False):\n"
        "        return integers.astype('<i8').tobytes()\n"
        "    def reveal(self, payload, label, wide=False):\n        import numpy\n"
        "        return numpy.frombuffer(payload, '<i8').copy()\n"
        "class TestClear(SumProfileContract):\n    profile = replace(PROFILE, open=Clear)\n    n_sites = (2,)\n"
    )
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_acme.py"]
    environment = {"PYTHONPATH": str(tmp_path / "packages"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert "TestAcme" not in done.stdout.partition("short test summary")[2], done.stdout
    assert "test_acme.py::TestClear::test_the_server_reads_neither" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1


def test_every_built_in_profile_is_held_to_the_contract() -> None:
    held = {test.profile.name for test in (TestMasks, TestBfv, TestCkks)}
    assert held == set(BUILT_IN) - {"plain"}
    assert all(isinstance(profile, SumProfile) and profile.statement.rows() for profile in BUILT_IN.values())
