"""An extension that was built from earlier C sources is refused by name, instead of failing in the midst of a job."""

from __future__ import annotations

import hashlib
import importlib
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from he_processors import _native
from he_processors.errors import BackendUnavailable
from nvflare_plugins.growth import _native as growth

SOURCES = {_native: {6: "c67b9bcbdecd0512"}, growth: {3: "38994bbc4b84319f"}}
"""Of each package: the interface's number -> the C sources that have it."""


def digest(folder: Path) -> str:
    files = sorted([*folder.glob("*.c"), *folder.glob("*.h")])
    texts = (re.sub(r"#define INTERFACE \d+", "", path.read_text()) for path in files)
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@pytest.mark.parametrize("package", SOURCES)
def test_a_change_of_the_c_sources_has_a_number_of_its_own(package: ModuleType) -> None:
    folder = Path(package.__file__ or "").parent
    headers = "".join(path.read_text() for path in folder.glob("*.h"))
    (in_header,) = re.findall(r"#define INTERFACE (\d+)", headers)
    assert int(in_header) == package.INTERFACE
    assert {package.INTERFACE: digest(folder)} == SOURCES[package], (
        "the C sources have changed: raise INTERFACE in _native/__init__.py and in the header, build, and write the "
        "new digest here, so that extensions of before are refused"
    )


@pytest.mark.parametrize("old", [SimpleNamespace(__file__="/x/_curve.so"), SimpleNamespace(__file__=None, INTERFACE=0)])
def test_an_extension_of_other_sources_is_refused_with_the_remedy(
    old: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: old)
    with pytest.raises(BackendUnavailable, match=r"_native/_curve.*Remedy: build it again") as told:
        _native.extension("_curve")
    assert "/x/" not in str(told.value)
    with pytest.raises(BackendUnavailable, match=r"^nvflare_plugins/growth/_native/_curve"):
        _native.extension("_curve", growth.__name__, 1)


def test_an_extension_that_was_not_built_is_none() -> None:
    assert _native.extension("_nosuch") is None
