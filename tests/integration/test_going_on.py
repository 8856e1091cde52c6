"""Jobs that go on without a lost site: what they train, what they never send twice, and what a lying server gains."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.attempt.job_context import CannotGoOn
from nvflare_plugins.base.errors import DataRefusal, JobAborted, PolicyRefusal
from nvflare_plugins.flare.kinds import KINDS
from nvflare_plugins.kinds.horizontal import going_on
from nvflare_plugins.kinds.horizontal.going_on import GradientMoves
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.site.data_refusals import RefusalCount
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_values import Floors
from nvflare_plugins.wire.envelope import Kind, unpack
from nvflare_plugins.xgb.continuation import with_last_round_weighed
from nvflare_plugins.xgb.model_json import PARTS_ATTRIBUTE
from tests.support.examples import slow
from tests.support.federation import Federation, SiteDied, central_model, dies_at, leaf_difference, succeed
from tests.support.horizontal_jobs import BOUNDS, LOGISTIC, dies_after, job, lose, table
from tests.support.opened_sums import Opened

CONSENTS = {"continue_without_site": True, "plain_profile": True, "exact_leaves": True}
TWO = {"consents": {**CONSENTS, "fewer_than_three_sites": True}, "min_sites": 2, "max_colluders": 0}
ALL = ("site-1", "site-2", "site-3", "site-4")
LEFT = ("site-1", "site-3", "site-4")
ROWS = table(400)


def going(params: dict | None = None, n_rounds: int = 4, **fields: Any) -> HorizontalJob:
    spaced = {} if "cuts" in fields else {"cuts": "uniform", "cut_bounds": BOUNDS}
    return job(params, n_rounds, **{"on_lost_site": "continue", **spaced, **fields})


def federation_of(folder: Path, frame: Any = ROWS, **policy: Any) -> Federation:
    federation = Federation.of(folder, 4, {"consents": CONSENTS, **policy}, train=frame)
    federation.set_registry_keys()
    return federation


def go_on(federation: Federation, training: HorizontalJob, number: int = 2, sites: tuple[str, ...] = LEFT, **how: Any):
    return federation.run(training, "job", number=number, sites=sites, **how)


def refused(outcomes: dict[str, Any]) -> str:
    """Return why nobody has a result; all have an error."""
    assert all(isinstance(one, VeilBoostError) for one in outcomes.values()), outcomes
    reasons = {str(one) for one in outcomes.values() if type(one) is not JobAborted}
    return " | ".join(sorted(reasons))


# -- what it trains ---------------------------------------------------------------------------------------------------


def parts_of(model: bytes) -> list[tuple[int, int, list[str]]]:
    said = json.loads(json.loads(model)["learner"]["attributes"][PARTS_ATTRIBUTE])
    return [(part["first"], part["step"], part["sites"]) for part in said["parts"]]


@pytest.mark.parametrize(
    ("nth", "params"),
    [(8, {}), *slow((5, {"objective": "reg:logistic", "lambda": 2.0})), (12, {"num_parallel_tree": 2, "max_depth": 2})],
)
def test_the_model_is_that_of_xgboost_going_on_with_the_rows_that_are_left(tmp_path: Path, nth: int, params) -> None:
    federation, training = federation_of(tmp_path), going(params)
    lose(federation, training, tamper={"site-2": dies_at(Kind.HISTOGRAM, nth)})
    succeed(go_on(federation, training))
    ours = federation.model(sites=LEFT)
    (_, _, first), (n_done, step, last) = parts_of(ours)
    assert (first, step, last) == (list(ALL), 1, list(LEFT)) and 0 < n_done < 4
    whole, cuts = {**LOGISTIC, **params}, federation.cuts()
    start = central_model(ROWS, "y", whole, cuts, n_done)
    beside = with_last_round_weighed(bytes(start.save_raw("json")), step)
    rows = np.concatenate([part for i, part in enumerate(np.array_split(np.arange(400), 4)) if i != 1])
    central = central_model(ROWS.iloc[rows], "y", whole, cuts, 4 - n_done, initial=beside)
    assert leaf_difference(ours, central) < 1e-5
    record = federation.record("site-1")
    assert [row.round for row in record.rounds] == list(range(n_done, 4))
    assert f"Rounds {n_done + 1} to 4 were trained by site-1, site-3, site-4." in record.notes
    assert f"Rounds 1 to {n_done} were trained by {', '.join(ALL)}." in record.notes


@pytest.mark.parametrize(
    "training",
    [
        going({"objective": "multi:softprob", "num_class": 2}),
        going({"subsample": 0.5, "colsample_bytree": 0.8}, cuts="quantile"),
        *slow(going({"eval_metric": ["logloss", "auc"]}, cuts="quantile", evaluate_training=True)),
        going({"grow_policy": "lossguide", "max_leaves": 6}, cuts="exact"),
        *slow(going({}, weight="f3")),
    ],
    ids=["classes", "samples", "metrics", "leaves", "weights"],
)
def test_other_trainings_go_on_too(tmp_path: Path, training: HorizontalJob) -> None:
    frame = ROWS.assign(f3=1.0 + (ROWS.f3.fillna(0).abs() * 4).round() / 4)
    federation = federation_of(tmp_path, frame, consents={**CONSENTS, "exact_cuts": True})
    lose(federation, training, tamper={"site-2": dies_at(Kind.HISTOGRAM, 9)})
    frames: list[tuple[str, bytes]] = []
    succeed(go_on(federation, training, frames=frames))
    # Nothing that depends on rows alone is summed anew, and no round is evaluated.
    summed = {frame.kind for _, data in frames if (frame := unpack(data)).operation.name == "SUM"}
    assert summed <= {Kind.HISTOGRAM, Kind.ROOT_SUM} and Kind.HISTOGRAM in summed
    assert not any(row.metrics for row in federation.record("site-1").rounds)


def test_sites_may_be_lost_one_after_the_other_and_after_the_last_round(tmp_path: Path) -> None:
    federation, training = federation_of(tmp_path, **TWO), going()
    lose(federation, training, tamper={"site-2": dies_at(Kind.HISTOGRAM, 6)})
    lose(federation, training, 2, sites=LEFT, tamper={"site-4": dies_at(Kind.HISTOGRAM, 1)})  # before a round is done
    lose(federation, training, 3, sites=("site-1", "site-3"), tamper={"site-3": dies_at(Kind.MODEL_CHECK)})
    two = ("site-1", "site-3")
    succeed(go_on(federation, training, 4, two))
    parts = parts_of(federation.model(sites=two))
    assert [sites for _, _, sites in parts] == [list(ALL), list(two)]
    assert parts[1][1] == 2  # the state beside the checkpoint was used with site-4: the next one


# -- what is never sent twice -----------------------------------------------------------------------------------------


@pytest.fixture
def opened() -> Iterator[Opened]:
    watch = Opened()
    with watch.at_work():
        yield watch


@pytest.mark.parametrize("engine", ["own", *slow("xgboost")])
def test_the_attack_works_on_a_new_job_without_the_site(tmp_path: Path, opened: Opened, engine: str) -> None:
    """The control: what the registry refuses unless a site consents gives away counts and the first histogram."""
    federation = federation_of(tmp_path, consents={**CONSENTS, "recompute_with_changes": True})
    params = {"base_score": 0.5}  # else the first gradients differ by the lost site's labels
    succeed(federation.run(going(params, 2, cuts="quantile", engine=engine), "first"))
    second = going(params, 2, cuts="quantile", engine=engine, on_lost_site="wait")
    succeed(federation.run(second, "second", sites=LEFT))
    found = set(opened.found_by_subtraction())
    assert {("CUT_COUNTS", "site-2"), ("HISTOGRAM", "site-2")} <= found


def test_the_attack_works_where_a_state_is_summed_twice(tmp_path: Path, opened: Opened, monkeypatch) -> None:
    """The control: from the last checkpoint itself, the root histogram with and without the site differ by its own."""
    monkeypatch.setattr(going_on.Course, "_may_enter", lambda self, state, sites: True)
    monkeypatch.setattr(going_on.Course, "next_step", lambda self, model, sites: 0)
    monkeypatch.setattr(GradientMoves, "have_moved", lambda self, model, number, earlier: True)
    federation, training = federation_of(tmp_path), going()
    lose(federation, training, tamper={"site-2": dies_at(Kind.HISTOGRAM, 8)})
    succeed(go_on(federation, training))
    assert ("HISTOGRAM", "site-2") in set(opened.found_by_subtraction())


@pytest.mark.parametrize(
    ("nth", "engine"),
    [
        *((6, "own"), (6, "xgboost")),
        *slow(*((nth, "own") for nth in (4, 5, 7, 8, 9)), (8, "xgboost")),
    ],
)
def test_no_two_opened_sums_differ_by_what_one_site_gave(tmp_path: Path, opened: Opened, nth: int, engine: str) -> None:
    training = going({"subsample": 0.7} if nth == 6 else {}, engine=engine, cuts="quantile")
    federation = federation_of(tmp_path)
    lose(federation, training, tamper={"site-2": dies_at(Kind.HISTOGRAM, nth)})
    succeed(go_on(federation, training))
    assert len({sites for _, sites, _, _ in opened.sums.values()}) == 2
    assert not set(opened.found_by_subtraction())


def test_a_state_at_which_nothing_was_sent_is_gone_on_from_as_it_is(tmp_path: Path, opened: Opened) -> None:
    federation, training = federation_of(tmp_path), going()
    on_progress = dies_after("site-2", 2)
    lose(federation, training, on_progress=lambda name: on_progress(name))
    # The others have sent the next histogram by then, so that they go on beside that state.
    succeed(go_on(federation, training))
    assert parts_of(federation.model(sites=LEFT))[1][1] == 1
    assert not set(opened.found_by_subtraction())


# -- where it cannot go on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.HANDSHAKE, Kind.CUT_COUNTS, *slow(Kind.AGREEMENT, Kind.SCALE), Kind.HISTOGRAM])
def test_before_a_round_is_done_the_job_waits_and_opens_nothing(tmp_path: Path, opened: Opened, kind: Kind) -> None:
    federation, training = federation_of(tmp_path), going(cuts="quantile", n_rounds=3)
    lose(federation, training, tamper={"site-2": dies_at(kind, 1 if kind is Kind.SCALE else 2)})
    n_opened, outcomes = len(opened.sums), go_on(federation, training)
    if kind is Kind.HANDSHAKE:  # nobody had said anything of rows
        succeed(outcomes)
        return
    assert "no state to go on from" in refused(outcomes)
    assert all(isinstance(one, JobAborted) for one in outcomes.values()) and len(opened.sums) == n_opened
    succeed(federation.run(training, "job", number=3))  # the site is back


def test_too_few_rows_or_sites_may_be_left(tmp_path: Path) -> None:
    """Whether enough are left is told from what was counted with the lost site; nothing is counted anew."""
    parts = np.split(np.arange(400), [10, 380, 390])
    federation = Federation.of(tmp_path, 4, {"consents": CONSENTS, "min_effective_rows": 100}, parts=parts, train=ROWS)
    training = going({}, cuts="quantile", min_rows_per_cut=10)
    lose(federation, training, tamper={"site-1": dies_at(Kind.HISTOGRAM, 8)})
    left = ("site-2", "site-3", "site-4")
    assert "too few rows or sites" in refused(go_on(federation, training, sites=left))
    for site in left:
        federation.set_policy(site, min_sites=4)
    assert "asks for 4 sites" in refused(go_on(federation, training, 3, left))


def test_other_jobs_on_the_same_rows_stand_against_it_which_is_said_at_once_and_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation, training = federation_of(tmp_path), going()
    succeed(federation.run(training, "before"))  # its sums are at the same states, of all sites
    assert "only waits" not in caplog.text
    lose(federation, training, tamper={"site-2": dies_at(Kind.HISTOGRAM, 8)})
    assert "only waits for a lost site: an earlier job trained on these rows" in caplog.text
    caplog.clear()
    for number in range(2, 4):
        outcomes = go_on(federation, training, number)
        assert "an earlier job trained on these rows" in refused(outcomes)
        assert any(isinstance(one, CannotGoOn) for one in outcomes.values())
    assert not any(isinstance(one, DataRefusal) for one in outcomes.values())
    for site in LEFT:
        assert not RefusalCount(SitePolicy.load(federation.workspace(site), site)).counts()
    succeed(federation.run(training, "job", number=4))  # the site is back


def test_an_attempt_that_was_lost_early_is_no_earlier_job(tmp_path: Path) -> None:
    federation, training = federation_of(tmp_path), going(cuts="quantile", n_rounds=3)
    lose(federation, training, tamper={"site-2": dies_at(Kind.CUT_COUNTS, 2)})
    lose(federation, training, 2, sites=ALL, tamper={"site-2": dies_at(Kind.HISTOGRAM, 8)})
    succeed(go_on(federation, training, 3))


def test_a_policy_that_would_never_let_it_go_on_is_named_before_anything_runs(tmp_path: Path) -> None:
    federation = federation_of(tmp_path, min_sites=4)
    outcomes = federation.run(going(), "job")
    assert any("could never go on: with one site less" in str(one) for one in outcomes.values()), outcomes
    succeed(federation.run(going(n_rounds=1, on_lost_site="wait"), "other"))


# -- a server that lies -----------------------------------------------------------------------------------------------


def test_a_server_that_lets_two_halves_go_on_gains_no_difference(tmp_path: Path, opened: Opened) -> None:
    """Each half trains a model of its own; no sum over all of them is opened at any state of either."""
    federation, training = federation_of(tmp_path, **TWO), going()
    lose(federation, training, tamper={"site-2": dies_at(Kind.HISTOGRAM, 8)})
    for half in (("site-1", "site-3"), ("site-2", "site-4")):
        succeed(go_on(federation, training, sites=half))
    assert not set(opened.found_by_subtraction())
    states = [{state for state, _ in course(federation, site).states} for site in ("site-1", "site-2")]
    with_all = {state for state, sites in course(federation, "site-1").states if sites == ALL}
    assert states[0] & states[1] and with_all  # both halves stand at the same state, which all never entered
    assert not any(sites != ALL for state, sites in course(federation, "site-2").states if state in with_all)


def course(federation: Federation, site: str) -> going_on.Course:
    return going_on.Course.of(going_on.RunFolder(federation.workspace(site) / "runs", "job"))


def test_a_server_cannot_have_sites_train_with_one_part_after_another(tmp_path: Path, opened: Opened) -> None:
    """Sums over all parts that lack one site would give every single one's."""
    federation, training = federation_of(tmp_path), going(n_rounds=6)
    lose(federation, training, tamper={"site-2": dies_at(Kind.HISTOGRAM, 8)})
    lose(federation, training, 2, sites=LEFT, tamper={"site-4": dies_at(Kind.HISTOGRAM, 2)})
    for number, sites in enumerate((("site-1", "site-2", "site-3"), ("site-1", "site-2", "site-4"), ALL), 3):
        outcomes = go_on(federation, training, number, sites)
        assert "had not" in refused(outcomes), outcomes
    assert not set(opened.found_by_subtraction())
    succeed(go_on(federation, training, 6))


def test_an_answer_that_the_server_hides_does_not_make_a_state_new(tmp_path: Path, opened: Opened) -> None:
    """Nobody got the root histogram; the server may hand it to a site that pools with it, whenever it likes."""
    federation, training = federation_of(tmp_path), going()

    def hides(site: str) -> Callable[[bytes], bytes]:
        seen: list[int] = []

        def tamper(reply: bytes) -> bytes:
            if unpack(reply).kind is Kind.HISTOGRAM:
                seen.append(1)
                if len(seen) == 7:  # the root of the third round
                    raise SiteDied
            return reply

        return tamper

    outcomes = federation.run(training, "job", tamper_reply={site: hides(site) for site in ALL})
    assert all(isinstance(one, SiteDied) for one in outcomes.values())
    succeed(go_on(federation, training))
    assert parts_of(federation.model(sites=LEFT))[1][:2] == (2, 1)


def test_a_site_that_pools_with_the_server_cannot_talk_others_into_a_used_state(tmp_path: Path, monkeypatch) -> None:
    """It says that it has entered nothing, and everything that it likes: each site asks its own notes."""
    federation, training = federation_of(tmp_path), going()
    lose(federation, training, tamper={"site-2": dies_at(Kind.HISTOGRAM, 8)})
    monkeypatch.setattr(going_on.Course, "next_step", lambda self, model, sites: 0)
    assert "no state in common that is new" in refused(go_on(federation, training))


def test_checkpoints_of_the_way_that_was_left_are_not_gone_on_from(tmp_path: Path) -> None:
    """A site is two checkpoints behind, and lost next: the others' belong to rounds that are not those of all."""
    federation, training = federation_of(tmp_path, **TWO), going(n_rounds=8)
    lose(federation, training, tamper={"site-2": dies_at(Kind.HISTOGRAM, 15)})
    held = {site: checkpoints(federation, site) for site in LEFT}
    *_, first, _, last = sorted(held["site-3"])
    for number in held["site-3"]:
        if number > first:
            held["site-3"][number].unlink()
    lose(federation, training, 2, sites=LEFT, tamper={"site-3": dies_at(Kind.HISTOGRAM, 5)})
    assert max(checkpoints(federation, "site-1")) < last
    left = ("site-1", "site-4")
    succeed(go_on(federation, training, 3, left))
    parts = parts_of(federation.model(sites=left))
    assert [(n_done, sites) for n_done, _, sites in parts][:2] == [(0, list(ALL)), (first, list(LEFT))]
    assert parts[2][0] == first + 1 and parts[2][2] == list(left)


def checkpoints(federation: Federation, site: str) -> dict[int, Path]:
    return going_on.RunFolder(federation.workspace(site) / "runs", "job").checkpoints()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "17",
        "{}",
        '{"members": 3, "set_up": null}',
        '{"members": [], "set_up": 5}',
        '{"members": [], "set_up": []}',
        "[" * 5000,
        '{"members": [], "set_up": {"floors": [], "sites": []}}',
        "\xff",
    ],
)
def test_a_course_that_is_none_is_refused_in_words(tmp_path: Path, content: str) -> None:
    (tmp_path / going_on.FILE).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"course.json of job .* cannot be read: submit the job anew"):
        going_on.Course.of(SimpleNamespace(path=tmp_path))


def test_no_state_is_forgotten_however_many_others_were_entered_since(tmp_path: Path) -> None:
    """A site that sends other sums at each attempt leads the others through new states without end."""
    within = {"model": {"iteration_indptr": [0]}}
    model = json.dumps({"learner": {"gradient_booster": within, "learner_model_param": {"base_score": "0"}}})
    ours = going_on.Course(tmp_path / going_on.FILE, has_moved=lambda *_: True)
    ours.join(ALL)
    ours.begin(going_on.SetUp(ALL, None, (1.0,), (4, 9), Floors(9, 1, 4), {}), 0)
    ours.enter(model.encode(), ALL, 0)
    for number in range(1, 300):
        ours.enter(model.replace('"0"', f'"{number}"').encode(), LEFT, number)
    ours = going_on.Course.of(SimpleNamespace(path=tmp_path))
    with pytest.raises(CannotGoOn, match="together with other sites"):
        ours.enter(model.encode(), LEFT, 0)
    ours.enter(model.encode(), ALL, 0)


# -- what is refused beforehand ---------------------------------------------------------------------------------------


def test_a_site_that_does_not_consent_takes_part_in_no_such_job(tmp_path: Path) -> None:
    federation = federation_of(tmp_path)
    federation.set_policy("site-3", consents={"plain_profile": True})
    outcomes = federation.run(going(), "job")
    assert isinstance(outcomes["site-3"], PolicyRefusal) and "continue_without_site" in str(outcomes["site-3"])
    assert not any(isinstance(one, dict) for one in outcomes.values())


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"objective": "reg:squarederror"}, "hessians count rows"),
        ({"objective": "binary:hinge"}, "hessians count rows"),
        ({"objective": "reg:absoluteerror"}, "hessians count rows"),
        ({"booster": "dart"}, "dart"),
        ({"objective": "multi:softprob", "num_class": 2, "multi_strategy": "multi_output_tree"}, "multi_output_tree"),
    ],
)
def test_trainings_whose_sums_would_give_the_site_away_are_refused_by_name(tmp_path: Path, params, match) -> None:
    outcomes = federation_of(tmp_path).run(going(params), "job")
    assert any(isinstance(one, ConfigurationError) and match in str(one) for one in outcomes.values()), outcomes


def test_leaves_that_are_counted_are_refused(tmp_path: Path) -> None:
    frame = ROWS.assign(y=1.0 + ROWS.y)
    federation = federation_of(tmp_path, frame)
    federation.set_policy("site-4", min_rows_per_node=4)  # one site's policy is enough
    outcomes = federation.run(going({"objective": "reg:gamma"}), "job")
    assert any("whose leaves' rows are counted" in str(one) for one in outcomes.values()), outcomes


@pytest.mark.parametrize(
    "fields",
    [
        {"early_stopping_rounds": 2, "eval_data_set": "held_out"},
        {"pooled_metrics": True, "eval_data_set": "held_out"},
        {"resume_from": "earlier"},
    ],
)
def test_fields_that_need_the_lost_site_are_refused(fields: dict) -> None:
    with pytest.raises(ConfigurationError, match="refused with on_lost_site='continue'"):
        going(**fields)


@pytest.mark.parametrize(("kind", "match"), [("vertical", "columns"), ("private_trees", "noise")])
def test_kinds_that_cannot_go_on_without_a_site_say_why(kind: str, match: str) -> None:
    with pytest.raises(ConfigurationError, match=f"on_lost_site='continue' is refused: .*{match}.*Use 'wait'"):
        KINDS[kind].job.from_dict({"on_lost_site": "continue"})


def test_a_damaged_course_is_refused(tmp_path: Path) -> None:
    federation, training = federation_of(tmp_path), going()
    lose(federation, training, tamper={"site-2": dies_at(Kind.HISTOGRAM, 8)})
    path = federation.workspace("site-1") / "runs" / "job" / going_on.FILE
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text('{"members": 3')
    assert "cannot be read" in refused(go_on(federation, training))
    path.unlink()  # a site that has forgotten what it sent goes on nowhere
    outcomes = go_on(federation, training, 3)
    refused(outcomes)
    assert any(isinstance(one, CannotGoOn) for one in outcomes.values())


# -- courses drawn at random -------------------------------------------------------------------------------------------


ROUNDS = 6
MOST_ATTEMPTS = 5


def entered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str, tuple[str, ...]]]:
    """Note, beside what sites keep themselves, every state that one of them enters, and with whom."""
    notes: list[tuple[Path, str, tuple[str, ...]]] = []
    real, lock = going_on.Course.enter, threading.Lock()

    def enter(self: going_on.Course, model: bytes, sites: tuple[str, ...], n_done: int) -> None:
        real(self, model, sites, n_done)
        with lock:
            notes.append((self.path, going_on.state_of(model), sites))

    monkeypatch.setattr(going_on.Course, "enter", enter)
    return notes


def lying_server(rng: np.random.Generator, before: tuple[str, ...], dead: str | None) -> tuple[str, ...]:
    """Return the sites of the next attempt: those that are left, all again, or any that the server fancies."""
    choice = rng.integers(4)
    if choice == 0:
        return ALL
    if choice == 1:
        return tuple(sorted(map(str, rng.choice(ALL, size=int(rng.integers(2, 4)), replace=False))))
    left = tuple(site for site in before if site != dead)
    return left if len(left) > 1 else before


def play(folder: Path, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    federation = Federation.of(folder, 4, TWO, train=ROWS)
    training = going({"subsample": 0.7} if seed % 3 == 0 else {}, ROUNDS)
    found, sites = [], ALL
    for number in range(1, MOST_ATTEMPTS + 1):
        dies = str(rng.choice(sites)) if number < MOST_ATTEMPTS else None
        kind = (Kind.HISTOGRAM, Kind.HISTOGRAM, Kind.MODEL_CHECK, Kind.CUT_COUNTS)[int(rng.integers(4))]
        kind = Kind.HISTOGRAM if number == 1 and seed % 8 else kind
        nth = int(rng.integers(1, 18)) if kind is Kind.HISTOGRAM else 1
        tamper = {} if dies is None else {dies: dies_at(kind, nth)}
        outcomes = federation.run(training, "job", number=number, sites=sites, tamper=tamper)
        found.append(outcomes)
        models = {(federation.workspace(s) / "runs/job/model.json").read_bytes() for s in done(outcomes)}
        assert len(models) <= 1, "the sites of an attempt ended with different models"
        if done(outcomes):
            break
        sites = lying_server(rng, sites, dies)
    return found


def done(outcomes: dict[str, Any]) -> list[str]:
    return [site for site, one in outcomes.items() if not isinstance(one, Exception)]


def check(folder: Path, seed: int, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> int:
    notes = entered(monkeypatch)
    attempts = play(folder, seed)
    for outcomes in attempts:
        assert all(
            isinstance(one, VeilBoostError | SiteDied) or site in done(outcomes) for site, one in outcomes.items()
        )
    with_whom: dict[tuple[Path, str], set[tuple[str, ...]]] = {}
    for path, state, sites in notes:
        with_whom.setdefault((path, state), set()).add(sites)
    assert all(len(sets) == 1 for sets in with_whom.values())
    assert not set(opened.found_by_subtraction())
    return len({sites for _, sites, _, _ in opened.sums.values()})


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_a_server_names_no_two_opened_sums_give_a_site_away(tmp_path, opened, monkeypatch, seed: int) -> None:
    check(tmp_path, seed, opened, monkeypatch)


@pytest.mark.slow
def test_many_courses_of_attempts(tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    n_sets = []
    for seed in range(3, 33):
        with monkeypatch.context() as patched:
            opened.sums.clear()
            n_sets.append(check(tmp_path / str(seed), seed, opened, patched))
    assert sum(n > 1 for n in n_sets) >= 8  # so many had sums opened over different sites at all
