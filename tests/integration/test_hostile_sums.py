"""Servers that cheat with sums, in every kind of job and message: noticed by tags, unnoticed without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import AuthenticationError, VeilBoostError
from he_processors.field61 import MODULUS
from he_processors.sum_tags import PairMacs
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.wire.envelope import Codec, Kind, Operation, pack_list, unpack, unpack_list
from tests.support import hostile_server, plugins
from tests.support.examples import slow
from tests.support.federation import Federation, succeed
from tests.support.hostile_server import CheatingServer, Lie, Meeting, believe_every_sum
from tests.support.private_federation import PrivateFederation
from tests.support.private_federation import job_of as private_job

ALL, ONE = None, (1,)
SIGN = "the server or a site"
LOGISTIC = {"objective": "binary:logistic", "max_depth": 2, "max_bin": 8, "eval_metric": ["logloss"]}
UNIFORM = {"cuts": "uniform", "cut_bounds": {name: [-3.0, 3.0] for name in "abc"}}

OF_TIMES = Kind.RISK_SUMS, Kind.CELL_FLAGS, Kind.CLASS_COUNTS
JOBS: dict[Kind, dict] = {
    Kind.EFFECTIVE_ROWS: {},
    Kind.CUT_COUNTS: {"cuts": "quantile", "cut_bounds": None},
    Kind.SCALE: {},
    Kind.ROW_COUNT: {"engine": "xgboost"},
    Kind.WEIGHT_TOTAL: {"weight": "w", "engine": "xgboost"},
    Kind.LABEL_MEAN: {},
    Kind.STUMP_SUM: {"params": {**LOGISTIC, "objective": "reg:pseudohubererror", "eval_metric": ["mae"]}},
    Kind.HISTOGRAM: {},
    Kind.ROOT_SUM: {"engine": "xgboost"},
    Kind.LEAF_ROWS: {"params": {**LOGISTIC, "objective": "reg:gamma", "eval_metric": ["mae"]}, "label": "positive"},
    Kind.LEAF_VALID: {"params": {**LOGISTIC, "objective": "reg:absoluteerror", "eval_metric": ["mae"]}},
    Kind.LEAF_QUANTILE: {"params": {**LOGISTIC, "objective": "reg:absoluteerror", "eval_metric": ["mae"]}},
    **{
        kind: {"params": {**LOGISTIC, "objective": "survival:cox", "eval_metric": []}, "label": {"signed": "days"}}
        for kind in OF_TIMES
    },
    Kind.METRIC: {},
    Kind.HISTOGRAM_METRIC: {"num_rounds": 2},
}


def job(kind: Kind = Kind.HISTOGRAM, profile: str = "masks") -> HorizontalJob:
    fields = {"params": LOGISTIC, "num_rounds": 1, "evaluate_training": True, "label": "y", **UNIFORM, **JOBS[kind]}
    fields = {name: value for name, value in fields.items() if value is not None}
    return HorizontalJob("train", profile=profile, **fields)


def table(kind: Kind = Kind.HISTOGRAM) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(90, 3)).astype(np.float32), columns=list("abc"))
    frame.iloc[::20] = np.nan  # no column is complete, so that the root sum travels
    label = (np.nan_to_num(frame.iloc[:, 0]) > 0).astype(np.float32)
    if kind is Kind.LEAF_ROWS:
        return frame.assign(positive=label + 1)
    if kind in OF_TIMES:
        return frame.assign(days=np.where(label, 1, -1) * rng.uniform(1, 9, 90).astype(np.float32))
    return frame.assign(y=label, w=1.5) if kind is Kind.WEIGHT_TOTAL else frame.assign(y=label)


def sites(folder: Path, kind: Kind = Kind.HISTOGRAM, **policy: object) -> Federation:
    floors = {"min_rows_per_node": 2} if kind is Kind.LEAF_ROWS else {}
    return Federation.of(folder, policy={**floors, **policy}, train=table(kind))


class Server:
    """Makes one server that cheats, and keeps it."""

    def __init__(self, kind: Kind, lie: Lie, nth: int = 1, victims: tuple[int, ...] | None = ALL) -> None:
        self._make = partial(CheatingServer, kind=kind, lie=lie, nth=nth, victims=victims)
        self.made: CheatingServer | None = None

    def __call__(self, *arguments: object, **rest: object) -> CheatingServer:
        self.made = self._make(*arguments, **rest)
        return self.made

    @property
    def has_lied(self) -> bool:
        return self.made is not None and self.made.has_lied


def assert_noticed(outcomes: Mapping[str, object], kind: Kind, victims: tuple[int, ...] | None) -> None:
    assert all(isinstance(outcome, VeilBoostError) for outcome in outcomes.values()), outcomes
    lied_to = [site for rank, site in enumerate(sorted(outcomes)) if victims is ALL or rank in victims]
    noticed = [str(outcomes[s]) for s in lied_to if isinstance(outcomes[s], AuthenticationError)]
    assert noticed and all(text.startswith(f"{kind.name} (") and SIGN in text for text in noticed)
    assert all(kind.name in str(error) and SIGN in str(error) for error in outcomes.values()), "the others are told"


def assert_no_model(federation: Federation, outcomes: Mapping[str, object]) -> None:
    for site in outcomes:
        assert not (federation.workspace(site) / "runs" / "job" / "model.json").exists()


# -- every kind of message --------------------------------------------------------------------------------------------


TOLD = [
    pytest.param(
        kind,
        victims,
        id=f"{kind.name}-{'all' if victims is ALL else 'one'}",
        marks=[] if victims is ALL or kind in (Kind.SCALE, Kind.HISTOGRAM) else [pytest.mark.slow],
    )
    for kind in JOBS
    for victims in (ONE, ALL)
]


@pytest.mark.parametrize(("kind", "victims"), TOLD)
def test_one_step_more_in_any_sum_is_noticed(tmp_path, kind, victims):
    federation, server = sites(tmp_path, kind), Server(kind, hostile_server.one_step, victims=victims)
    outcomes = federation.run(job(kind), make_server=server)
    assert server.has_lied, "no such message travelled"
    assert_noticed(outcomes, kind, victims)
    assert_no_model(federation, outcomes)


def test_flags_of_a_metric_are_tagged_too(tmp_path):
    """Without that a server could tell all sites that the metric is infinite."""

    def set_flag(meeting: Meeting) -> bytes:
        body, tail = meeting.body_and_tail(meeting.honest)
        return body + hostile_server._with_word(tail, 0, 1)

    federation, server = sites(tmp_path), Server(Kind.METRIC, set_flag)
    assert_noticed(federation.run(job(Kind.METRIC), make_server=server), Kind.METRIC, ALL)


def with_first_residue(change: Callable[[int], int]) -> Lie:
    """Return a lie that changes what is first behind the values: of a root with metrics, a metric's numerator."""

    def lie(meeting: Meeting) -> bytes:
        body, tail = meeting.body_and_tail(meeting.honest)
        first = int.from_bytes(tail[:8], "little")
        return body + change(first).to_bytes(8, "little") + tail[8:]

    return lie


@pytest.mark.parametrize(
    ("profile", "change"),
    [
        pytest.param("masks", lambda word: (word + 1) % MODULUS, id="a step more"),
        pytest.param("masks", lambda word: MODULUS, id="no residue under masks"),
        pytest.param("plain", lambda word: MODULUS, id="no residue"),
        # The residue is masked under plain as well: what is added to it is added to the sum.
        pytest.param("plain", lambda word: (word + (1 << 59) + (1 << 58)) % MODULUS, id="beyond any sum"),
    ],
)
def test_metrics_that_ride_are_refused_where_they_are_no_sum(tmp_path, profile, change):
    kind = Kind.HISTOGRAM_METRIC
    federation, server = sites(tmp_path), Server(kind, with_first_residue(change))
    outcomes = federation.run(job(kind, profile), make_server=server)
    assert server.has_lied
    assert_noticed(outcomes, kind, ALL)
    assert_no_model(federation, outcomes)


@pytest.mark.parametrize(("n_bytes", "profile"), [(-8, "masks"), (8, "plain"), *slow((-8, "plain"), (8, "masks"))])
def test_a_root_with_metrics_of_another_length_is_refused(tmp_path, profile, n_bytes):
    def lie(meeting: Meeting) -> bytes:
        return meeting.honest[:n_bytes] if n_bytes < 0 else meeting.honest + bytes(n_bytes)

    federation, server = sites(tmp_path), Server(Kind.HISTOGRAM_METRIC, lie)
    outcomes = federation.run(job(Kind.HISTOGRAM_METRIC, profile), make_server=server)
    assert server.has_lied and all(isinstance(outcome, VeilBoostError) for outcome in outcomes.values())
    assert_no_model(federation, outcomes)


# -- every lie --------------------------------------------------------------------------------------------------------

LIES: dict[str, Lie] = {
    lie.__name__: lie
    for lie in (
        hostile_server.drop,
        hostile_server.drop_values,
        hostile_server.double,
        hostile_server.replay,
        hostile_server.one_step,
        hostile_server.flip,
        hostile_server.scale,
        hostile_server.other_tags,
    )
}
OF_CIPHERTEXTS = ["drop", "drop_values", "double", "replay", "one_step", "other_tags"]
QUICK_LIES = {
    "masks": ("drop", "replay", "one_step", "flip", "other_tags"),
    "bfv": ("one_step",),
    "ckks": ("drop", "one_step"),
}
CASES = [("masks", lie) for lie in LIES] + [(profile, lie) for profile in ("bfv", "ckks") for lie in OF_CIPHERTEXTS]


def nth_of(lie: str) -> int:
    """Return which histogram to lie about; the third, a root, has the size of the first, which is replayed."""
    return 3 if lie == "replay" else 2


@pytest.mark.parametrize(
    ("profile", "lie"),
    [
        pytest.param(profile, lie, marks=[] if lie in QUICK_LIES[profile] else [pytest.mark.slow])
        for profile, lie in CASES
    ],
)
def test_every_lie_about_a_histogram_is_noticed(tmp_path, profile, lie):
    federation, server = sites(tmp_path), Server(Kind.HISTOGRAM, LIES[lie], nth=nth_of(lie))
    of = dataclasses.replace(job(profile=profile), num_rounds=2)
    outcomes = federation.run(of, make_server=server)
    assert server.has_lied
    assert_noticed(outcomes, Kind.HISTOGRAM, ALL)


UNNOTICED = [
    ("masks", "one_step"),
    ("masks", "flip"),
    ("bfv", "one_step"),
    ("ckks", "one_step"),
    ("ckks", "drop"),
    ("ckks", "drop_values"),
    ("ckks", "double"),
    ("ckks", "replay"),
]


QUICK = [("masks", "flip"), ("ckks", "one_step")]


@pytest.mark.parametrize(
    ("profile", "lie"), [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in UNNOTICED]
)
def test_the_same_lies_go_unnoticed_without_tags(tmp_path, monkeypatch, profile, lie):
    """The control. All sites are told the same, and end with one model: another one where the lie was large."""
    federation = sites(tmp_path)
    of = dataclasses.replace(job(profile=profile), num_rounds=2)
    succeed(federation.run(of, "honest"))
    believe_every_sum(monkeypatch)
    server = Server(Kind.HISTOGRAM, LIES[lie], nth=nth_of(lie))
    succeed(federation.run(of, "lied-to", make_server=server))
    assert server.has_lied
    is_large = lie != "one_step"
    assert (federation.model("lied-to") != federation.model("honest")) or not is_large


def test_sites_that_change_places_inside_a_sum_change_nothing(tmp_path):
    federation = sites(tmp_path)
    succeed(federation.run(job(), "honest"))
    server = Server(Kind.HISTOGRAM, lambda meeting: meeting.sum_of(meeting.frames[::-1]))
    succeed(federation.run(job(), "turned", make_server=server))
    assert server.has_lied and federation.model("turned") == federation.model("honest")


def test_a_request_for_another_scale_cannot_be_hidden_from_the_others(tmp_path):
    """A site that asks contributes nothing: its tags lack in the sum that the others are shown."""
    federation, server = sites(tmp_path), Server(Kind.HISTOGRAM, hostile_server.drop, victims=(0, 1))
    assert_noticed(federation.run(job(), make_server=server), Kind.HISTOGRAM, (0, 1))


# -- other kinds of job, other profiles -------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", ["one_step", "drop", "flip"])
def test_sums_of_private_trees_are_tagged(tmp_path, lie):
    federation, server = PrivateFederation(tmp_path), Server(Kind.NODE_STATS, LIES[lie], nth=2)
    outcomes = federation.run_private(private_job(), make_server=server).outcomes
    assert server.has_lied
    assert_noticed(outcomes, Kind.NODE_STATS, ALL)


def test_without_tags_a_server_changes_private_trees_unnoticed(tmp_path, monkeypatch):
    believe_every_sum(monkeypatch)
    federation, server = PrivateFederation(tmp_path), Server(Kind.NODE_STATS, hostile_server.flip, nth=2)
    federation.run_private(private_job(), make_server=server).succeed()
    assert server.has_lied


def test_a_trusted_server_may_change_sums_and_no_tag_travels(tmp_path):
    """It adds the noise: nobody could tell that from a change."""
    run = PrivateFederation(tmp_path).run_private(private_job(trust="trusted_aggregator"))
    run.succeed()
    sums = [frame for _, data in run.frames if (frame := unpack(data)).operation is Operation.SUM]
    assert sums and not any(frame.tail for frame in sums)


def test_plain_carries_no_tags_and_its_scales_do(tmp_path):
    frames: list[tuple[str, bytes]] = []
    succeed(sites(tmp_path).run(job(profile="plain"), frames=frames))
    sums = [frame for _, data in frames if (frame := unpack(data)).operation is Operation.SUM]
    in_clear = {frame.kind: frame.tail for frame in sums if frame.codec is Codec.PLAIN}
    assert in_clear.pop(Kind.METRIC) == 16 and not any(in_clear.values()), "two flags, and no tags"
    assert {frame.kind for frame in sums if frame.codec is Codec.MASKED} == {Kind.SCALE}


@pytest.mark.parametrize("is_tagged", [True, False])
def test_sums_of_a_plugin_are_tagged_outside_of_it(tmp_path, monkeypatch, is_tagged):
    plugins.forget()
    plugins.install(tmp_path / "installed", monkeypatch)
    federation = sites(tmp_path, **plugins.POLICY)
    if not is_tagged:
        believe_every_sum(monkeypatch)
    server = Server(Kind.HISTOGRAM, hostile_server.flip)
    outcomes = federation.run(job(profile=plugins.PROFILE), make_server=server)
    plugins.forget()
    assert server.has_lied
    if is_tagged:
        assert_noticed(outcomes, Kind.HISTOGRAM, ALL)
    else:
        succeed(outcomes)


# -- what is gathered -------------------------------------------------------------------------------------------------

Turn = Callable[[bytes], bytes]


def gathered(kind: Kind, change: Callable[[list[bytes]], list[bytes]], occurrence: int = 1) -> Turn:
    """Change the list of an answer, the nth of a kind."""
    seen: list[int] = []

    def tamper(data: bytes) -> bytes:
        frame = unpack(data)
        if frame.kind is not kind or frame.operation is not Operation.GATHER:
            return data
        seen.append(1)
        if len(seen) != occurrence:
            return data
        parts = unpack_list(bytes(frame.payload), 3)
        return dataclasses.replace(frame, payload=pack_list(change(parts))).pack()

    return tamper


def flipped(parts: list[bytes]) -> list[bytes]:
    return [parts[0], parts[1], bytes([parts[2][0] ^ 1]) + parts[2][1:]]


def own_of_another(parts: list[bytes]) -> list[bytes]:
    return [parts[0], parts[0], parts[2]]


def nothing(parts: list[bytes]) -> list[bytes]:
    return [parts[0], parts[1], b""]


GATHERED = [(Kind.AGREEMENT, 1), (Kind.MODEL_CHECK, 1), (Kind.CLOSING, 1), (Kind.CLOSING, 2)]


@pytest.mark.parametrize(("kind", "nth"), GATHERED, ids=lambda value: str(getattr(value, "name", value)))
@pytest.mark.parametrize("change", [flipped, *slow(own_of_another, nothing)])
def test_gathered_messages_that_are_changed_are_noticed_by_name(tmp_path, kind, nth, change):
    federation = sites(tmp_path)
    outcomes = federation.run(job(), tamper_reply={"site-1": gathered(kind, change, nth)})
    text = str(outcomes["site-1"])
    assert isinstance(outcomes["site-1"], AuthenticationError) and f"{kind.name} (" in text and SIGN in text
    assert "site-2" in text or "site-3" in text, "whose part it is"


def test_a_site_without_the_last_answer_has_no_model_and_says_so(tmp_path):
    """The server withholds it from one site: the others have the same model, and that site knows what it lacks."""
    federation = sites(tmp_path)
    outcomes = federation.run(job(), tamper_reply={"site-3": gathered(Kind.CLOSING, nothing)})
    assert "left without its result" in str(outcomes["site-3"])
    written = [(federation.workspace(s) / "runs" / "job" / "model.json") for s in federation.sites]
    assert not written[2].exists()
    assert len({path.read_bytes() for path in written if path.exists()}) <= 1


@pytest.mark.parametrize("has_macs", [True, False])
def test_no_site_finalises_before_all_have_confirmed(tmp_path, monkeypatch, has_macs):
    """A server that forges the other sites' last confirmation leaves everyone without a model, unless nobody looks."""
    federation = sites(tmp_path)
    if not has_macs:
        monkeypatch.setattr(PairMacs, "check", lambda self, sender, message, place: message[: -self.size])

    def forged(rank: int) -> Callable[[list[bytes]], list[bytes]]:
        return lambda parts: [parts[rank]] * 3

    replies = {site: gathered(Kind.CLOSING, forged(rank)) for rank, site in enumerate(federation.sites)}
    outcomes = federation.run(job(), tamper_reply=replies)
    if not has_macs:
        succeed(outcomes)
        return
    refused = [str(outcome) for outcome in outcomes.values() if isinstance(outcome, AuthenticationError)]
    assert refused and all("left without its result" in text for text in refused)
    assert all(isinstance(outcome, VeilBoostError) for outcome in outcomes.values())
    assert_no_model(federation, outcomes)
