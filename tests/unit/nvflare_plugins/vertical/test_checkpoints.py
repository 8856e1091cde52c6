"""Checkpoints of one party: what was written is read, damage is refused, nobody else may read them."""

from __future__ import annotations

import json
import stat

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.kinds.vertical.context import Checkpoint, read_checkpoints


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    made = RunFolder(tmp_path, "job").create()
    for n in (1, 2, 4, 6):
        Checkpoint(n, f"{n:02x}", f"content {n}").write(made)
    return made


def test_the_last_three_come_back_and_are_private(folder):
    assert read_checkpoints(folder) == {n: Checkpoint(n, f"{n:02x}", f"content {n}") for n in (2, 4, 6)}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.checkpoints().values())
    folder.drop_checkpoints()
    assert read_checkpoints(folder) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"content": "other"},
        {"n_rounds": 4},
        {"tag": None},
        {"format": "x"},
        {"digest": ""},
        {"content": None},
        {"content": "\ud800"},
    ],
    ids=str,
)
def test_a_damaged_one_is_left_out(folder, change):
    path = folder.checkpoints()[6]
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert sorted(read_checkpoints(folder)) == [2, 4]


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"null", b"[" * 100_000])
def test_other_files_alone_are_refused(folder, content):
    for path in folder.checkpoints().values():
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="checkpoints of job job cannot be read"):
        read_checkpoints(folder)
