"""The fuzzer itself: every target reads its corpus, and crashes are told from refusals."""

from __future__ import annotations

import mmap
import os

import pytest

from he_processors.errors import ProtocolError
from tests.fuzz import run
from tests.fuzz.mutation import Mutator
from tests.fuzz.targets import Target

SLOW = {
    "element",
    "affine point",
    "two readers",
    "bfv message",
    "registry",
    "parquet",
    "model",
    "ciphertexts",
    "points",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in run.TARGETS]
)
def test_a_target_answers_or_refuses(name: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "keep", lambda data: data.hex())
    target = run.TARGETS[name]()
    crashes: dict[str, dict[str, str]] = {}
    mutator = Mutator(target.corpus, 7, target.most)
    accepted = sum(run._try(target, data, crashes) for data in target.corpus)
    for _ in range(25):
        run._try(target, mutator.next(), crashes)
    assert not crashes
    assert accepted or name.startswith("native"), "nothing of the corpus gets through"


def test_a_crash_is_told_from_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(data: bytes) -> int:
        if not data:
            raise ProtocolError("empty")
        return [1, 2, 3][data[0]] if data[0] < 250 or len(data) > 1 else int("x")

    monkeypatch.setattr(run, "keep", lambda data: data.hex())
    monkeypatch.setitem(run.TARGETS, "planted", lambda: Target(parse, [b"\0"]))
    found = run.fuzz("planted", 0.2, 1)
    assert found["inputs"] > 0
    assert {crash["what"].split(" ")[0] for crash in found["crashes"]} >= {"IndexError"}
    assert bytes.fromhex(found["crashes"][0]["input"])[0] > 2


def test_inputs_come_from_their_seed_alone() -> None:
    streams = [[Mutator([b"abc", b"defg"], seed, 100).next() for _ in range(1)] for seed in (1, 1)]
    one, other = (Mutator([b"abc", b"defg"], seed, 100) for seed in (1, 2))
    assert streams[0] == streams[1]
    assert [one.next() for _ in range(20)] != [other.next() for _ in range(20)]


def test_what_a_process_read_when_it_died_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """A native crash ends the process: its last input stands in a file that the parent reads."""
    monkeypatch.setattr(run, "keep", lambda data: data.hex())
    window = tmp_path / "window"
    window.write_bytes(bytes(run._WINDOW))
    monkeypatch.setitem(
        run.TARGETS, "dies", lambda: Target(lambda data: os._exit(9) if data[:1] > b"\4" else 0, [b"\0"])
    )
    child = os.fork()
    if not child:
        with window.open("r+b") as file, mmap.mmap(file.fileno(), run._WINDOW) as shared:
            run.fuzz("dies", 60.0, 3, shared)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    content = window.read_bytes()
    size = int.from_bytes(content[8:16], "little")
    assert content[16 : 16 + size][:1] > b"\4"
