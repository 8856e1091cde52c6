"""What an attempt leaves to the next: read back as it was, and refused or taken for lost otherwise."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ProtocolError
from nvflare_plugins.kinds.dpboost.job import KEPT_FILE
from nvflare_plugins.kinds.dpboost.server import HASH_BYTES, KEY_BYTES, KeptAnswers

KEYS = [bytes([n]) * KEY_BYTES for n in range(3)]
OFFER_BYTES = KEY_BYTES + 8 + HASH_BYTES
answer_lists = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), max_size=5)


class Sites:
    """Other sites: their answers to whatever is gathered."""

    def __init__(self, *answers: bytes, rank: int = 0) -> None:
        self.channel, self.answers, self.n_gathered = SimpleNamespace(rank=rank), answers, 0

    def gather_sealed(self, purpose: str, content: bytes) -> list[bytes]:
        self.n_gathered += 1
        return [content if rank == self.channel.rank else other for rank, other in enumerate(self.answers)]


def kept(folder: Path, *answers: list[int], key: bytes = KEYS[1]) -> KeptAnswers:
    one = KeptAnswers(folder, is_kept=True)
    one.agree(Sites(b""), [b""], key)
    for answer in answers:
        one.add(np.array(answer, dtype=np.int64))
    return KeptAnswers(folder, is_kept=True)


@given(answer_lists)
def test_what_is_kept_is_read_back(answers: list[list[int]]) -> None:
    with TemporaryDirectory() as folder:
        again = kept(Path(folder), *answers)
        assert again.key == KEYS[1] and (Path(folder) / KEPT_FILE).stat().st_mode & 0o777 == 0o600
        assert [again.take(len(answer)).tolist() for answer in answers] == answers
        assert again.take(1) is None
        again.drop()
        assert KeptAnswers(Path(folder), is_kept=True).offer() == b""


@given(st.binary(max_size=200))
def test_a_file_of_any_other_bytes_counts_as_lost(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        (Path(folder) / KEPT_FILE).write_bytes(content)
        one = KeptAnswers(Path(folder), is_kept=True)
        assert one.key == one.offer() == b"" and one.take(1) is None


def test_a_job_that_does_not_wait_keeps_and_reads_nothing(tmp_path: Path) -> None:
    kept(tmp_path, [1, 2])
    one = KeptAnswers(tmp_path, is_kept=False)
    assert one.offer() == b"" and one.take(1) is None
    content = (tmp_path / KEPT_FILE).read_bytes()
    one.agree(Sites(b""), [b""], KEYS[2])
    one.add(np.array([3]))
    assert one.key == KEYS[2] and (tmp_path / KEPT_FILE).read_bytes() == content


def test_a_site_takes_what_another_one_holds_and_keeps_it(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    one, two, three = (kept(tmp_path / name, *([[7], [8, 9]][:n])) for n, name in enumerate(("one", "two", "three")))
    offers = [site.offer() for site in (one, two, three)]
    for rank, site in enumerate((one, two, three)):
        site.agree(Sites(b"", b"", three._answers, rank=rank), offers, KEYS[2])
    for name in ("one", "two", "three"):
        again = KeptAnswers(tmp_path / name, is_kept=True)
        assert (again.key, again.take(1).tolist(), again.take(2).tolist()) == (KEYS[1], [7], [8, 9])


def test_sites_that_hold_the_same_give_each_other_nothing(tmp_path: Path) -> None:
    one, sites = kept(tmp_path, [7]), Sites(b"", b"")
    one.agree(sites, [one.offer()] * 2, KEYS[2])
    assert sites.n_gathered == 0


@given(st.lists(st.one_of(st.binary(max_size=OFFER_BYTES + 9), st.binary(min_size=OFFER_BYTES, max_size=OFFER_BYTES))))
def test_any_other_accounts_of_sites_are_refused(offers: list[bytes]) -> None:
    with TemporaryDirectory() as folder:
        one = kept(Path(folder), [7])
        own = one.offer()
        others = [offer for offer in offers if offer not in (b"", own)]
        try:
            one.agree(Sites(b"", *others), [own, *others], KEYS[2])
        except ProtocolError:
            return
        assert not others


def test_different_keys_or_answers_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    one, two = kept(tmp_path / "one", [7]), kept(tmp_path / "two", [7, 8], key=KEYS[2])
    with pytest.raises(ProtocolError, match="different keys"):
        one.agree(Sites(b"", b""), [one.offer(), two.offer()], KEYS[0])
    three = kept(tmp_path / "three", [6, 8])
    with pytest.raises(ProtocolError, match="different answers"):
        one.agree(Sites(b"", three._answers), [one.offer(), three.offer()], KEYS[0])
    with pytest.raises(ProtocolError, match="different answers"):  # not what was announced
        one.agree(Sites(b"", b""), [one.offer(), kept(tmp_path / "three", [7, 8]).offer()], KEYS[0])


def test_answers_that_end_in_the_midst_of_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="in the midst"):
        kept(tmp_path, [7]).take(2)
