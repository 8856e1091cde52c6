from __future__ import annotations

import logging

import pytest

from he_processors import backends
from he_processors.bignum import registry
from he_processors.bignum.registry import available_backends, load_backend, open_backend
from he_processors.errors import BackendUnavailable, ConfigurationError

MODULUS = 2**89 - 1


@pytest.fixture(autouse=True)
def _forget_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(registry.ENVIRONMENT_VARIABLE, raising=False)
    registry.BACKENDS.forget()
    yield
    registry.BACKENDS.forget()


def _refuse() -> None:
    raise BackendUnavailable("no such instructions here")


def test_python_backends_always_run() -> None:
    assert {"gmpy2", "reference"} <= set(available_backends())


def test_a_backend_whose_libraries_are_missing_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy may import where a library that it loads later is not there."""
    from he_processors.bignum import cuda

    def lacks_a_library() -> None:
        raise ImportError("libnvrtc.so: cannot open shared object file")

    monkeypatch.setattr(cuda, "load", lacks_a_library)
    assert "cuda" not in available_backends()
    with pytest.raises(BackendUnavailable):
        load_backend("cuda")


def test_every_available_backend_opens_under_its_name() -> None:
    for name in available_backends():
        assert open_backend(name, MODULUS).name == name


def test_auto_takes_the_fastest_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=backends.__name__):
        arithmetic = open_backend("auto", MODULUS)
    assert arithmetic.name == available_backends()[0]
    assert f"backend {arithmetic.name} runs" in caplog.text


def test_auto_passes_over_what_does_not_run_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("cuda", "ifma", "avx2", "portable"):
        monkeypatch.setitem(registry._LOADERS, name, _refuse)
    with caplog.at_level(logging.INFO, logger=backends.__name__):
        assert open_backend("auto", MODULUS).name == "gmpy2"
    assert "ifma: no such instructions here" in caplog.text


def test_a_backend_asked_for_by_name_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._LOADERS, "cuda", _refuse)
    with pytest.raises(BackendUnavailable):
        open_backend("cuda", MODULUS)
    monkeypatch.setenv(registry.ENVIRONMENT_VARIABLE, "cuda")
    with pytest.raises(BackendUnavailable):
        open_backend("auto", MODULUS)


def test_environment_variable_stands_in_for_auto_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.ENVIRONMENT_VARIABLE, "reference")
    assert open_backend("auto", MODULUS).name == "reference"
    assert open_backend("gmpy2", MODULUS).name == "gmpy2"


def test_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError):
        load_backend("fastest")
    monkeypatch.setenv(registry.ENVIRONMENT_VARIABLE, "")
    with pytest.raises(ConfigurationError):
        open_backend("auto", MODULUS)
