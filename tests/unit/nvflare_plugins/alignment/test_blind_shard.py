"""Blinding on a party's workers: the same bytes with any number of them, the key with nobody else, losses named."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.base.errors import WorkerFailure, WorkerLost
from nvflare_plugins.kinds.alignment import intersection as blinding
from nvflare_plugins.kinds.alignment.intersection import BlindingKey, Lists, SpreadKey, held_by, intersect
from nvflare_plugins.kinds.alignment.job import FILE, load_alignment
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.workers.workers import Workers
from tests.support.alignment import run_parties
from tests.support.seeded_randomness import SeededRandomness
from tests.support.workers_here import workers_here
from tests.unit.nvflare_plugins.alignment.test_site import places, run

ITEMS = [f"Müller, Jürgen {number}".encode() for number in range(23)]


@pytest.fixture(autouse=True)
def _small_sets_go_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blinding, "LEAST_POINTS", 0)
    monkeypatch.setattr("nvflare_plugins.kinds.alignment.align.LEAST_IDS", 0)


def key(seed: int = 1) -> BlindingKey:
    return BlindingKey(b"test", SeededRandomness(seed))


@pytest.mark.parametrize("n_workers", [1, 2, 3])
@pytest.mark.parametrize("n_items", [0, 1, 2, 23])
def test_workers_blind_to_the_same_bytes_in_the_same_order(n_workers: int, n_items: int) -> None:
    items, alone = ITEMS[:n_items], key()
    points = key(2).blind_items(ITEMS)[:n_items]
    with workers_here(n_workers) as workers, held_by(key(), workers) as spread:
        assert isinstance(spread, SpreadKey)
        assert spread.blind_items(items) == (alone.blind_items(items) if items else [])
        assert spread.blind(points) == alone.blind(points)
        assert spread.unblind(spread.blind(points)) == points


def test_few_points_are_not_sent_and_without_workers_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blinding, "LEAST_POINTS", 24)
    with workers_here(2) as workers, held_by(key(), workers) as spread:
        before = [one.calls for one in workers.work]
        assert spread.blind_items(ITEMS) == key().blind_items(ITEMS)
        assert [one.calls for one in workers.work] == before
    one = key()
    with held_by(one, None) as same:
        assert same is one


@pytest.mark.parametrize("bad", [bytes(32), b"\xff" * 32, b"", b"\0"])
def test_what_is_no_element_is_refused_in_the_same_words(bad: bytes) -> None:
    points = [*key(2).blind_items(ITEMS), bad]
    with pytest.raises(ProtocolError) as alone:
        key().blind(points)
    with workers_here(3) as workers, held_by(key(), workers) as spread:
        for call in (spread.blind, spread.unblind):
            with pytest.raises(ProtocolError) as found:
                call(points)
            assert str(found.value) == str(alone.value)


def test_the_key_goes_to_workers_by_one_way_and_is_let_go() -> None:
    one = key()
    secret = one.for_workers()[1]
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(one)
    with workers_here(2) as workers:
        with held_by(one, workers) as spread:
            hosts = [link._host for link in workers._links]  # type: ignore[attr-defined]
            assert [host._part._key.for_workers()[1] for host in hosts] == [secret] * 2, "the control"
            shown = f"{one!r} {spread!r} {hosts[0]._part!r}"
            assert secret.hex() not in shown and str(int.from_bytes(secret, "little")) not in shown
        assert not any(hasattr(host._part, "_key") for host in hosts)


@pytest.mark.parametrize("error", [ProtocolError("a message"), WorkerLost("worker 1"), KeyboardInterrupt()])
def test_the_key_is_let_go_whatever_ends_the_intersection(error: BaseException) -> None:
    with workers_here(2) as workers:
        hosts = [link._host for link in workers._links]  # type: ignore[attr-defined]
        with pytest.raises(type(error)) as raised, held_by(key(), workers):
            raise error
        assert raised.value is error
        assert not any(hasattr(host._part, "_key") for host in hosts)


def test_the_key_is_let_go_where_a_worker_does_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers_here(2) as workers:
        hosts = [link._host for link in workers._links]  # type: ignore[attr-defined]
        take = hosts[1].begin
        refusal = ("refused", "ProtocolError", "these bytes are no blinding key")
        monkeypatch.setattr(hosts[1], "begin", lambda path, args: refusal if args else take(path, args))
        with pytest.raises(ProtocolError, match="no blinding key"), held_by(key(), workers):
            pass
        assert not any(hasattr(host._part, "_key") for host in hosts)


@pytest.mark.parametrize("secret", [b"", bytes(32), b"\xff" * 32, b"\1" * 31])
def test_no_other_bytes_are_taken_as_a_key(secret: bytes) -> None:
    with pytest.raises(ProtocolError, match="no blinding key"):
        BlindingKey.given(b"test", secret)


@pytest.mark.parametrize("n_workers", [(0, 0, 0), (1, 0, 2), (3, 2, 1)])
def test_parties_find_the_same_with_any_workers(tmp_path, monkeypatch, n_workers: tuple[int, ...]) -> None:
    monkeypatch.setattr("nvflare_plugins.kinds.alignment.intersection.BLOCK", 8)
    sets = [ITEMS[:20], ITEMS[3:], ITEMS[::-1][1:]]

    def take_part(channel: Any, session: Any, policy: Any) -> list[bytes]:
        lists, own = Lists(channel, session, "test", 22), sets[channel.rank]
        n = n_workers[channel.rank]
        with workers_here(max(n, 1)) as workers:
            found = intersect(lists, own, [len(one) for one in sets], 1, b"test", workers=workers if n else None)
        return sorted(own[place] for place in found)

    assert run_parties(tmp_path, 3, take_part) == [sorted(ITEMS[3:20])] * 3


class _LostAtPoints:
    """A worker that is lost when a peer's points come."""

    def __init__(self, link: Any) -> None:
        self._link = link

    def ask(self, function: str, *args: Any) -> Any:
        if function == "call" and args[1][0] == "blind":
            raise WorkerLost("worker 1 of this site's cluster was lost; its log, or its machine's, says why")
        return self._link.ask(function, *args)


IDS = [["Jörg", "3", "9", "Zoë"], ["Zoë", "1", "3", "Jörg"]]
CLUSTER = {"scheduler": "tcp://127.0.0.1:8786", "workers": 2}


def test_a_job_aligns_on_the_policys_workers_and_its_report_says_what_they_did(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        "nvflare_plugins.kinds.alignment.align.open_workers", lambda cluster: workers_here(cluster.workers)
    )
    parties = places(tmp_path, IDS, cluster=CLUSTER)
    assert len({outcome.hmac for outcome in run(parties)}) == 1  # type: ignore[union-attr]
    for context, own in zip(parties, IDS, strict=True):
        assert [own[row] for row in load_alignment(context, "job-1", "people").positions] == ["3", "Jörg", "Zoë"]
        record = RunRecord.read(context.runs / "job-1")
        assert [section.title for section in record.sections] == ["Aligned rows", "Workers"] and not record.notes


def test_a_lost_worker_ends_the_job_at_all_parties_and_is_named(tmp_path, monkeypatch) -> None:
    def with_a_loss(cluster: Any) -> Workers:
        workers = workers_here(cluster.workers)
        workers._links[1] = _LostAtPoints(workers._links[1])  # type: ignore[index]
        return workers

    monkeypatch.setattr("nvflare_plugins.kinds.alignment.align.open_workers", with_a_loss)
    parties = places(tmp_path, IDS, cluster={**CLUSTER, "sites": ["party-b"]})
    outcomes = run(parties)
    assert isinstance(outcomes[1], WorkerFailure) and "worker 1 of this site's cluster was lost" in str(outcomes[1])
    assert isinstance(outcomes[0], Exception)
    assert not list(tmp_path.rglob(FILE)), "no result is kept"


def test_small_sets_leave_the_cluster_aside_and_large_ones_need_it(tmp_path, monkeypatch) -> None:
    parties = places(tmp_path / "large", IDS, cluster={"scheduler": "tcp://127.0.0.1:9", "workers": 2})

    def nothing_listens(cluster: Any) -> Workers:
        raise ConfigurationError("the scheduler that the policy names cannot be reached")

    monkeypatch.setattr("nvflare_plugins.kinds.alignment.align.open_workers", nothing_listens)
    assert any("cannot be reached" in str(outcome) for outcome in run(parties))
    monkeypatch.setattr("nvflare_plugins.kinds.alignment.align.LEAST_IDS", 50_000)
    parties = places(tmp_path / "small", IDS, cluster=CLUSTER)
    assert len({outcome.hmac for outcome in run(parties)}) == 1  # type: ignore[union-attr]
    notes = RunRecord.read(parties[0].runs / "job-1").notes
    assert any("aligning fewer than 50,000 ids runs in the site's own process" in note for note in notes)
