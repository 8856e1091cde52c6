"""An extension that was built from earlier C sources is refused by name, instead of failing in the midst of a job."""

from __future__ import annotations

import hashlib
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from he_processors import _native
from he_processors.errors import BackendUnavailable

FOLDER = Path(_native.__file__).parent
SOURCES = {4: "0d88f53891b64282"}
"""The interface's number -> the C sources that have it."""


def digest() -> str:
    files = sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")])
    texts = (re.sub(r"#define INTERFACE \d+", "", path.read_text()) for path in files)
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def test_a_change_of_the_c_sources_has_a_number_of_its_own() -> None:
    (in_header,) = re.findall(r"#define INTERFACE (\d+)", (FOLDER / "interface.h").read_text())
    assert int(in_header) == _native.INTERFACE
    assert {_native.INTERFACE: digest()} == SOURCES, (
        "the C sources have changed: raise INTERFACE in _native/__init__.py and interface.h, build, and write the new "
        "digest here, so that extensions of before are refused"
    )


@pytest.mark.parametrize("old", [SimpleNamespace(__file__="/x/_curve.so"), SimpleNamespace(__file__=None, INTERFACE=0)])
def test_an_extension_of_other_sources_is_refused_with_the_remedy(
    old: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: old)
    with pytest.raises(BackendUnavailable, match=r"_native/_curve.*Remedy: build it again") as told:
        _native.extension("_curve")
    assert "/x/" not in str(told.value)


def test_an_extension_that_was_not_built_is_none() -> None:
    assert _native.extension("_nosuch") is None
