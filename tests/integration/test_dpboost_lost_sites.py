"""DPBoost jobs that wait for a lost site: one noise, one charge and one key over all attempts."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dp_components.ledger import Ledger
from he_processors.errors import ConfigurationError, ProtocolError, VeilBoostError
from he_processors.randomness import OS_RANDOMNESS
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.base.errors import DataRefusal, JobAborted, PolicyRefusal
from nvflare_plugins.evidence.format import export_name
from nvflare_plugins.kinds.dpboost.job import KEPT_FILE, DpBoostJob
from nvflare_plugins.kinds.dpboost.server import HASH_BYTES, KEY_BYTES, DpBoostServer, steps
from nvflare_plugins.kinds.dpboost.training import run_dpboost_site
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.wire.envelope import Kind
from tests.support.examples import slow
from tests.support.federation import Parties, SiteDied, Tamper, dies_at, succeed
from tests.support.seeded_randomness import SeededRandomness

EPSILON = 2.0
PRIVACY = {"epsilon": 9.0, "delta": 1e-6, "pure_epsilon": 8.0}
N_STEPS = 9  # three trees of two levels


def job(**changes: object) -> DpBoostJob:
    """Return a job whose trees have all rows each, so that the key of an attempt makes no difference."""
    fields = {
        "data_set": "rows",
        "label": "y",
        "epsilon": EPSILON,
        "feature_bounds": {"a": [0, 1], "b": [0, 1]},
        "variant": "seq",
        "n_trees": 3,
        "depth": 2,
        "n_candidates": 8,
        "on_lost_site": "wait",
    }
    return DpBoostJob.from_dict({**fields, **changes})


def shared(**changes: object) -> DpBoostJob:
    """Return a job whose trees share the rows, as the key says."""
    return job(**{"variant": "dpboost", "trees_per_ensemble": 3, **changes})


def rows() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"id": np.arange(600), "a": rng.random(600), "b": rng.random(600)})
    return frame.assign(y=(frame.a + 0.3 * rng.normal(size=600) > 0.5).astype(int))


class Job:
    """A job over all its attempts: the sites, and the one server that adds the noise."""

    def __init__(self, folder: Path, training: DpBoostJob, n_sites: int = 3, seed: int | None = 1) -> None:
        policy = {"unsigned_sessions": True, "data_sets": {}, "allowed_profiles": ["dp_trusted"]}
        self.parties, self.job = Parties(folder, n_sites, policy), training
        self.server = DpBoostServer(training, OS_RANDOMNESS if seed is None else SeededRandomness(seed))
        self.sums: list[tuple[object, bytes, bytes]] = []
        self.spends: list[tuple[str, str, float, float]] = []
        for number, site in enumerate(self.parties.sites):
            self.parties.give(site, "rows", rows().iloc[number::n_sites], id="id", privacy=PRIVACY)

    def attempt(self, number: int, **how: object) -> dict:
        def on_sum(frame, total):
            answer = self.server.answer(frame, total, lambda *spend: self.spends.append(spend))
            self.sums.append(((frame.kind, frame.moment, frame.n_values), total, answer))
            return answer

        return self.parties.run(run_dpboost_site, self.job, on_sum=on_sum, number=number, **how)

    def lose(self, number: int, **how: Mapping[str, Tamper]) -> None:
        outcomes = self.attempt(number, **how)
        assert any(isinstance(one, SiteDied) for one in outcomes.values()), outcomes

    def ledger(self, site: str) -> Ledger:
        return Ledger(self.parties.workspace(site) / "veilboost_ledgers" / site / "rows.ledger")

    def spent(self) -> set[float]:
        return {round(self.ledger(site).spent().pure_epsilon, 6) for site in self.parties.sites}

    def kept(self, site: str) -> Path:
        return self.parties.run_folder(site) / KEPT_FILE

    def model(self) -> bytes:
        models = {(self.parties.run_folder(site) / "model.json").read_bytes() for site in self.parties.sites}
        assert len(models) == 1
        return models.pop()

    def check_one_noise(self) -> None:
        """Every step has one sum and one answer, and there are as many as the plan pays for."""
        assert len(set(self.sums)) == len({step for step, *_ in self.sums}) == len(list(steps(self.job)))
        assert self.spent() == {EPSILON}
        assert not [site for site in self.parties.sites if self.kept(site).exists()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The model of the job that nothing befalls."""
    whole = Job(tmp_path_factory.mktemp("whole"), job())
    succeed(whole.attempt(1))
    return whole.model()


DEATHS = [
    ("tamper", Kind.HISTOGRAM, 2),
    ("tamper_reply", Kind.NODE_STATS, 3),
    ("tamper_reply", Kind.AGREEMENT, 1),
    ("tamper", Kind.CLOSING, 1),
    *slow(("tamper_reply", Kind.HISTOGRAM, 4), ("tamper", Kind.NODE_STATS, 1)),
    *slow(*(("tamper", Kind.HISTOGRAM, nth) for nth in (1, 3, 6)), ("tamper_reply", Kind.HISTOGRAM, 1)),
    *slow(("tamper_reply", Kind.NODE_STATS, 2), ("tamper", Kind.HANDSHAKE, 1), ("tamper", Kind.AGREEMENT, 1)),
    *slow(("tamper", Kind.MODEL_CHECK, 1), ("tamper", Kind.CLOSING, 2)),
]


@pytest.mark.parametrize(("when", "kind", "nth"), DEATHS)
def test_a_site_that_dies_anywhere_changes_neither_model_nor_price(
    tmp_path: Path, undisturbed: bytes, when: str, kind: Kind, nth: int
) -> None:
    """With a frame, or with the answer to one: then the server has answered, and others may have got it."""
    lost = Job(tmp_path / "lost", job())
    lost.lose(1, **{when: {"site-2": dies_at(kind, nth)}})
    succeed(lost.attempt(2))
    assert lost.model() == undisturbed
    lost.check_one_noise()


def test_a_death_in_every_attempt_at_another_site(tmp_path: Path) -> None:
    """The rows of a tree are those of the first attempt's key, whoever holds it: else an ensemble would cost more."""
    lost, keys = Job(tmp_path, shared()), set()
    for number, (site, nth) in enumerate(
        (("site-1", 1), ("site-2", 2), ("site-3", 1), ("site-1", 3), ("site-2", 2)), 1
    ):
        lost.lose(number, tamper={site: dies_at(Kind.HISTOGRAM, nth)})
        keys |= {lost.kept(one).read_bytes()[HASH_BYTES:][:KEY_BYTES] for one in lost.parties.sites}
    succeed(lost.attempt(6))
    assert len(keys) == 1
    lost.check_one_noise()
    assert {round(spend[2], 6) for spend in lost.spends} == {EPSILON}  # the trees of one ensemble
    record = RunRecord.read(lost.parties.run_folder("site-3"))
    assert any("Attempt 6" in note for note in record.notes) and len(record.rounds) < 3


@pytest.mark.parametrize("when", [*slow("tamper"), "tamper_reply"])
def test_a_start_that_was_paid_for_is_released_once(tmp_path: Path, when: str) -> None:
    lost = Job(tmp_path, shared(label_bounds=[0, 1], start_share=0.1, n_trees=4, trees_per_ensemble=2), seed=None)
    for number, site in ((1, "site-1"), (2, "site-3")):
        lost.lose(
            number, **{when: {site: dies_at(Kind.STUMP_SUM)} if number == 1 else {site: dies_at(Kind.NODE_STATS)}}
        )
    succeed(lost.attempt(3))
    lost.check_one_noise()
    assert lost.spends[-1][2] == pytest.approx(EPSILON)


def test_an_answer_that_a_site_has_got_is_asked_of_the_server_no_more(tmp_path: Path) -> None:
    """Only the exchange in which the site was lost is repeated; the sites give each other what one of them lacks."""
    lost = Job(tmp_path, shared())
    lost.lose(1, tamper_reply={"site-2": dies_at(Kind.NODE_STATS, 1)})
    sizes = [lost.kept(site).stat().st_size for site in lost.parties.sites]
    assert sizes[1] < max(sizes)
    succeed(lost.attempt(2))
    assert len(lost.sums) == N_STEPS
    lost.check_one_noise()


def test_an_answer_that_nobody_has_got_is_given_again(tmp_path: Path) -> None:
    """The server had drawn its noise; another attempt sends the same sum under other masks, and gets the same noise."""
    lost = Job(tmp_path, shared(), seed=None)
    lost.lose(1, tamper_reply=dict.fromkeys(lost.parties.sites, dies_at(Kind.NODE_STATS)))
    succeed(lost.attempt(2))
    repeated = [one for one in lost.sums if one == lost.sums[2]]
    assert len(repeated) == 2 and len(lost.sums) == N_STEPS + 1
    lost.check_one_noise()
    assert [spend[1].startswith("replayed") for spend in lost.spends] == [False, True, False, False]


def test_without_a_server_that_remembers_there_would_be_two_noises(tmp_path: Path) -> None:
    """The control: a server of each attempt's own draws anew, and the two answers differ."""
    lost = Job(tmp_path, job())
    lost.lose(1, tamper_reply=dict.fromkeys(lost.parties.sites, dies_at(Kind.NODE_STATS)))
    lost.server = _Forgetful(lost.job, lost.server)
    lost.attempt(2)
    leaves = [(total, answer) for (kind, *_), total, answer in lost.sums if kind is Kind.NODE_STATS]
    assert leaves[0][0] == leaves[1][0] and leaves[0][1] != leaves[1][1]


class _Forgetful(DpBoostServer):
    """A server that goes on where another one was, but for its memory of the last answer."""

    def __init__(self, training: DpBoostJob, before: DpBoostServer) -> None:
        super().__init__(training, SeededRandomness(2))
        self._answered, self._attempts = before._answered[:-1], list(before._attempts)


def test_rows_that_have_changed_meanwhile_end_the_job(tmp_path: Path) -> None:
    lost = Job(tmp_path, job())
    lost.lose(1, tamper={"site-2": dies_at(Kind.HISTOGRAM, 4)})
    lost.parties.give("site-2", "rows", rows().iloc[1::3].assign(y=0), id="id", privacy=PRIVACY)
    n_sums = len(lost.sums)
    assert isinstance(lost.attempt(2)["site-2"], DataRefusal)
    assert len(lost.sums) == n_sums


def test_the_server_answers_no_second_sum_of_a_step(tmp_path: Path) -> None:
    """Sites whose ledgers forgot the attempt before may send other rows' sums: the server has kept a hash."""
    lost = Job(tmp_path, job())
    lost.lose(1, tamper_reply=dict.fromkeys(lost.parties.sites, dies_at(Kind.NODE_STATS)))
    n_sums = len(lost.sums)
    for site in lost.parties.sites:
        shutil.rmtree(lost.parties.workspace(site))
    for number, site in enumerate(lost.parties.sites):
        lost.parties.give(site, "rows", rows().iloc[:-3].iloc[number::3], id="id", privacy=PRIVACY)
    outcomes = lost.attempt(2)
    assert all("an earlier attempt sent another sum" in str(one) for one in outcomes.values()), outcomes
    assert len(lost.sums) == n_sums


@pytest.mark.parametrize("n_trees", [1, 2])
def test_a_site_that_lost_its_ledger_pays_for_the_last_tree_or_ends_the_job(tmp_path: Path, n_trees: int) -> None:
    """What it lacks of the tree at which the job stood it pays anew; more than that cannot be made good."""
    lost = Job(tmp_path, job())
    lost.lose(1, tamper={"site-3": dies_at(Kind.NODE_STATS, n_trees)})
    shutil.rmtree(lost.parties.workspace("site-2") / "veilboost_ledgers")
    if n_trees == 1:
        succeed(lost.attempt(2))
        lost.check_one_noise()
        return
    outcomes = lost.attempt(2)
    assert isinstance(outcomes["site-1"], (PolicyRefusal, JobAborted)), outcomes
    assert any("hold different releases" in str(one) for one in outcomes.values()), outcomes


def test_a_site_that_lost_its_run_folder_gets_key_and_answers_from_the_others(tmp_path: Path) -> None:
    lost = Job(tmp_path, shared())
    lost.lose(1, tamper={"site-3": dies_at(Kind.HISTOGRAM, 4)})
    kept = lost.kept("site-2").read_bytes()
    assert lost.kept("site-2").stat().st_mode & 0o777 == 0o600
    lost.kept("site-2").write_bytes(kept[:-1])  # damaged
    lost.kept("site-3").unlink()
    succeed(lost.attempt(2))
    lost.check_one_noise()


def test_a_key_that_all_sites_have_lost_ends_the_job(tmp_path: Path) -> None:
    """Under another one a row would be in several trees of an ensemble, of which one is paid for."""
    lost = Job(tmp_path, shared())
    lost.lose(1, tamper={"site-3": dies_at(Kind.HISTOGRAM, 4)})
    for site in lost.parties.sites:
        lost.kept(site).unlink()
    n_sums = len(lost.sums)
    outcomes = lost.attempt(2)
    assert any("asks for something else" in str(one) for one in outcomes.values()), outcomes
    assert len(lost.sums) == n_sums


def test_sites_that_were_told_different_answers_end_the_job(tmp_path: Path) -> None:
    lost = Job(tmp_path, job())
    lost.lose(1, tamper={"site-3": dies_at(Kind.HISTOGRAM, 3)})
    other = Job(tmp_path / "other", job(), seed=2)
    other.lose(1, tamper={"site-3": dies_at(Kind.HISTOGRAM, 2)})
    key = lost.kept("site-1").read_bytes()[HASH_BYTES:][:KEY_BYTES]
    kept = key + other.kept("site-1").read_bytes()[HASH_BYTES + KEY_BYTES :]
    lost.kept("site-1").write_bytes(hashlib.sha256(kept).digest() + kept)
    outcomes = lost.attempt(2)
    assert all(isinstance(one, VeilBoostError) for one in outcomes.values())
    assert any(isinstance(one, ProtocolError) and "different answers" in str(one) for one in outcomes.values())


def test_a_site_cannot_invent_what_the_server_has_answered(tmp_path: Path) -> None:
    """Else it would choose a model that others take, and pay for, though no sum of their rows went into it."""
    forged = Job(tmp_path, job())
    answers = np.zeros(sum(step.n_nodes for step in steps(forged.job)), dtype="<i8")
    kept = bytes(KEY_BYTES) + answers.tobytes()
    forged.kept("site-2").parent.mkdir(parents=True)
    forged.kept("site-2").write_bytes(hashlib.sha256(kept).digest() + kept)
    outcomes = forged.attempt(1)
    assert all(isinstance(one, VeilBoostError) for one in outcomes.values()), outcomes
    assert any("no site had paid for" in str(one) for one in outcomes.values()), outcomes
    assert not any((forged.parties.run_folder(site) / "model.json").exists() for site in forged.parties.sites)


def test_no_attempt_goes_on_among_other_sites_or_with_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server names both: the difference of two choices of sites is what one site gave."""
    lost = Job(tmp_path, job(), n_sites=4)
    first, others = lost.parties.sites[:3], lost.parties.sites[1:]
    lost.lose(1, tamper={"site-1": dies_at(Kind.NODE_STATS)}, sites=first)
    n_sums = len(lost.sums)
    assert all(isinstance(one, VeilBoostError) for one in lost.attempt(2, sites=others).values())
    lost.job = job(feature_bounds={"a": [0, 1], "b": [0, 2]})
    outcomes = lost.attempt(3, sites=first)
    assert all("another job than this site has begun" in str(one) for one in outcomes.values()), outcomes
    with monkeypatch.context() as forgetful:  # the ledger refuses by itself
        forgetful.setattr(RunFolder, "enter", lambda *_: None)
        outcomes = lost.attempt(4, sites=first)
    assert any("asks for something else" in str(one) for one in outcomes.values()), outcomes
    assert len(lost.sums) == n_sums
    lost.job = job()
    succeed(lost.attempt(5, sites=first))


def test_evidence_says_what_was_replayed(tmp_path: Path) -> None:
    lost = Job(tmp_path, job())
    lost.lose(1, tamper={"site-2": dies_at(Kind.HISTOGRAM, 5)})
    succeed(lost.attempt(2))
    text = (lost.parties.run_folder("site-1") / "evidence" / export_name("site-1")).read_text()
    assert text.count("replayed: paid for before") == 3  # two whole trees, and the one that was begun


def test_without_waiting_nothing_is_kept_and_a_loss_ends_the_job(tmp_path: Path) -> None:
    lost = Job(tmp_path, job(on_lost_site="stop"))
    lost.lose(1, tamper={"site-2": dies_at(Kind.HISTOGRAM, 5)})
    assert not [site for site in lost.parties.sites if lost.kept(site).exists()]
    for site in lost.parties.sites:
        (lost.parties.run_folder(site) / "evidence" / export_name(site)).unlink(missing_ok=True)
    assert all(isinstance(one, VeilBoostError) for one in lost.attempt(1).values())


def test_it_is_not_gone_on_without_a_site() -> None:
    with pytest.raises(ConfigurationError, match="on_lost_site='continue' is refused: the server"):
        job(on_lost_site="continue")
    with pytest.raises(ConfigurationError):
        DpBoostJob.from_dict({**job().to_dict(), "lost_site_deadline_s": -1})
