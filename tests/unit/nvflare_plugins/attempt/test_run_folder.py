"""What a job keeps at a site: damaged files are refused in words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.attempt.run_folder import ATTEMPT, RunFolder
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.xgb.cuts import Cuts


def test_kept_cuts_come_back_and_damaged_ones_are_refused(tmp_path):
    folder = RunFolder(tmp_path, "job")
    folder.path.mkdir(parents=True, exist_ok=True)
    assert folder.read_cuts() is None
    folder.write_cuts(Cuts((np.float32([0.5, 1.0]),)))
    kept = folder.read_cuts()
    assert kept is not None and kept.to_lists() == [[0.5, 1.0]]
    for content in (b"", b"{", b"[" * 100_000, b"[[1" + b"0" * 400 + b"]]", b"[[2, 1]]", b"[5]"):
        (folder.path / "cuts.json").write_bytes(content)
        with pytest.raises(VeilBoostError):
            folder.read_cuts()


def test_a_site_answers_rising_numbers_alone_whoever_asks(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "job").create()
    folder.enter(1, "aa", "j")
    folder.enter(3, "bb", "j")
    for number, attempt in ((3, "cc"), (3, "bb"), (2, "cc"), (1, "aa")):
        with pytest.raises(JobAborted, match=f"asks for attempt {number} .* has answered attempt 3"):
            RunFolder(tmp_path, "job").enter(number, attempt, "j")
    RunFolder(tmp_path, "job").enter(4, "aa", "j")


@pytest.mark.parametrize("kept", [b"", b"[]", b"{}", b'{"number": 3}', b'{"number": true, "job": "j"}', b"[" * 9999])
def test_a_number_that_cannot_be_read_answers_nobody(tmp_path: Path, kept: bytes) -> None:
    folder = RunFolder(tmp_path, "job").create()
    (folder.path / ATTEMPT).write_bytes(kept)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        folder.enter(9, "aa", "j")
