"""What a job keeps at a site: damaged files are refused in words."""

from __future__ import annotations

import numpy as np
import pytest

from he_processors.errors import VeilBoostError
from nvflare_plugins.attempt.run_folder import RunFolder
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
