"""Files of arrays: what np.savez wrote comes back, anything else is refused, and threads do not disturb each other."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import numpy as np
import pytest

import nvflare_plugins
from nvflare_plugins.site.memory.store import read_arrays

ARRAYS = {
    "floats": np.array([1.5, np.nan, -0.0], dtype=np.float32),
    "empty": np.empty(0, np.uint64),
    "bytes": np.frombuffer(b"{}", dtype=np.uint8),
    "matrix": np.arange(6, dtype=np.int64).reshape(3, 2),
    "no rows": np.empty((0, 61), dtype=np.uint32),
    "counts": np.array([2**40]),
}


def saved(path: Path, **arrays: np.ndarray) -> Path:
    content = io.BytesIO()
    np.savez(content, **arrays)
    path.write_bytes(content.getvalue())
    return path


def test_what_was_saved_comes_back(tmp_path):
    found = read_arrays(saved(tmp_path / "a.npz", **ARRAYS))
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert np.array_equal(found[name], array, equal_nan=array.dtype.kind == "f") and found[name].flags.writeable


def test_no_header_is_evaluated(tmp_path, monkeypatch):
    """The attack on np.load was Python's own: literal_eval in several threads."""

    def broken(_: str) -> None:
        raise SystemError("AST constructor recursion depth mismatch")

    path = saved(tmp_path / "a.npz", **ARRAYS)
    monkeypatch.setattr(ast, "literal_eval", broken)
    with pytest.raises(SystemError):
        np.load(path)["counts"]
    assert read_arrays(path)["counts"].tolist() == [2**40]


def test_no_code_of_ours_loads_arrays_otherwise():
    root = Path(nvflare_plugins.__file__).parent
    assert [p.name for p in root.rglob("*.py") if "np.load(" in p.read_text(encoding="utf-8")] == []


def test_any_cut_or_changed_file_is_refused_or_read_alike(tmp_path):
    good = saved(tmp_path / "a.npz", counts=np.arange(4)).read_bytes()
    changed = tmp_path / "b.npz"
    for length in range(len(good)):
        changed.write_bytes(good[:length])
        with pytest.raises(ValueError):
            read_arrays(changed)
    for position in range(len(good)):
        changed.write_bytes(good[:position] + bytes([good[position] ^ 0xFF]) + good[position + 1 :])
        try:
            found = read_arrays(changed)
        except ValueError:
            continue
        assert all(array.tolist() == [0, 1, 2, 3] for array in found.values())


@pytest.mark.parametrize(
    "array",
    [
        np.array(["text"]),
        np.array([{}], dtype=object),
        np.zeros((1, 1, 1)),
        np.array([1 + 2j]),
        np.asfortranarray(np.zeros((2, 3))),
    ],
    ids=["text", "object", "3d", "complex", "order"],
)
def test_other_arrays_are_refused(tmp_path, array):
    with pytest.raises(ValueError):
        read_arrays(saved(tmp_path / "a.npz", one=array))


def test_a_missing_file_is_no_damaged_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "none.npz")
