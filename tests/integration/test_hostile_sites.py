"""Sites that send nonsense or die, servers that stall or lie: a clear error at every site, and nothing half-written."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import AuthenticationError, ConfigurationError, JobAborted, ProtocolError, VeilBoostError
from he_processors.pair_macs import PairMacs
from nvflare_plugins.attempt import agreement
from nvflare_plugins.attempt.handshake import Hello
from nvflare_plugins.attempt.session import Session
from nvflare_plugins.horizontal import site as site_module
from nvflare_plugins.horizontal.job import HorizontalJob
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.wire.catalogue import Kind, Phase, TrainingStep
from nvflare_plugins.wire.envelope import Codec, Frame, FrameType, Operation, pack_list, unpack, unpack_list
from tests.support import federation as support
from tests.support.federation import Federation, SiteDied, Tamper, succeed
from tests.support.hostile_server import believe_every_sum
from tests.support.memories import states

Change = Callable[[Frame], Frame]

OF_OURS = [
    Kind.HANDSHAKE,
    Kind.GROUP_KEY,
    Kind.AGREEMENT,
    Kind.CUT_COUNTS,
    Kind.CUT_PLAN,
    Kind.SCALE,
    Kind.MODEL_CHECK,
    Kind.CLOSING,
]
OF_XGBOOST = [Kind.ROW_COUNT, Kind.LABEL_MEAN, Kind.HISTOGRAM, Kind.ROOT_SUM, Kind.METRIC]
KINDS = OF_OURS + OF_XGBOOST
SEALED_OR_SIGNED = [Kind.HANDSHAKE, Kind.GROUP_KEY, Kind.AGREEMENT, Kind.CUT_PLAN, Kind.MODEL_CHECK]
OF_LATTICES = [Kind.HE_SECRET, Kind.HE_PUBLIC, Kind.CUT_COUNTS, Kind.HISTOGRAM]


def small_job(**fields) -> HorizontalJob:
    params = {"objective": "binary:logistic", "max_depth": 2, "max_bin": 8, "eval_metric": ["logloss", "auc"]}
    fields = {"params": params, "num_rounds": 2, "evaluate_training": True, **fields}
    return HorizontalJob("train", "y", **fields)


def job_with(kind: Kind) -> HorizontalJob:
    """Return a job in which messages of this kind travel; the search for cuts would be most of its time."""
    if kind in (Kind.CUT_COUNTS, Kind.CUT_PLAN):
        return small_job()
    return small_job(cuts="uniform", cut_bounds={name: [-3.0, 3.0] for name in "abc"})


def small_table(columns: str = "abc") -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(60, len(columns))).astype(np.float32), columns=list(columns))
    frame.iloc[::20] = np.nan  # no column is complete, so that the root sum travels
    return frame.assign(y=(np.nan_to_num(frame.iloc[:, 0]) > 0).astype(np.float32))


@pytest.fixture
def federation(tmp_path) -> Federation:
    federation = Federation(tmp_path)
    federation.give_data("train", small_table())
    return federation


def at(kind: Kind, change: Callable[[bytes], bytes], occurrence: int = 1) -> Tamper:
    """Change one frame: the given occurrence of a kind."""
    seen = 0

    def tamper(data: bytes) -> bytes:
        nonlocal seen
        seen += unpack(data).kind is kind
        if seen == occurrence and unpack(data).kind is kind:
            seen += 1
            return change(data)
        return data

    return tamper


def on_frame(change: Change) -> Callable[[bytes], bytes]:
    return lambda data: change(unpack(data)).pack()


def with_fields(**fields) -> Callable[[bytes], bytes]:
    return on_frame(lambda frame: dataclasses.replace(frame, **fields))


def assert_failed_cleanly(federation: Federation, outcomes, job_id: str = "job") -> None:
    for site, outcome in outcomes.items():
        assert isinstance(outcome, (VeilBoostError, SiteDied)), f"{site}: {outcome!r}"
        assert "Traceback" not in str(outcome) and len(str(outcome)) < 5000
        folder = federation.workspace(site) / "runs" / job_id
        names = {path.name for path in folder.rglob("*")}
        assert not names & {"model.json", "run.json", "report.html"}
        assert not any(name.endswith(".partial") for name in names)
        for log in folder.glob("evidence/*.evidence.jsonl"):
            records = [json.loads(line) for line in log.read_text().splitlines()]
            assert [r["status"] for r in records if r["type"] == "end"] == ["aborted"]
        assert set(states(federation.workspace(site), site)) <= {"reserved"}


# -- sites that send nonsense
# -------------------------------------------------------------------------------------------

NONSENSE: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda data: data[:-1],
    "noise": lambda data: os.urandom(len(data)),
    "payload longer": on_frame(lambda f: dataclasses.replace(f, payload=f.payload + bytes(8))),
}
MORE_NONSENSE: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: b"",
    "header only": lambda data: data[:20],
    "trailing byte": lambda data: data + b"\0",
    "oversized": lambda data: data + bytes(1 << 20),
    "payload shorter": on_frame(lambda f: dataclasses.replace(f, payload=f.payload[:-8])),
    "other version": lambda data: data[:4] + b"\x01" + data[5:],
    "other magic": lambda data: b"NOPE" + data[4:],
    "other attempt": with_fields(attempt=bytes(16)),
    "other rank": with_fields(rank=0),
    "rank out of range": with_fields(rank=60_000),
    "counter ahead": on_frame(lambda f: dataclasses.replace(f, counter=f.counter + 1)),
    "counter behind": on_frame(lambda f: dataclasses.replace(f, counter=f.counter - 1)),
    "counter far ahead": with_fields(counter=2**64 - 1),
    "other kind": with_fields(kind=Kind.METRIC),
    "other operation": with_fields(operation=Operation.GATHER),
    "in clear": with_fields(codec=Codec.PLAIN),
    "as a ciphertext": with_fields(codec=Codec.BFV),
    "other phase": with_fields(moment=TrainingStep(Phase.EVALUATE, 0)),
    "other round": with_fields(moment=TrainingStep(Phase.UPDATE, 7)),
    "more values": on_frame(lambda f: dataclasses.replace(f, n_values=f.n_values + 1)),
    "four billion values": with_fields(n_values=2**32),
    "beyond all values": with_fields(n_values=2**63),
    "as the server's": with_fields(type=FrameType.RESULT),
    "an abort": with_fields(type=FrameType.ABORT),
    "attachment": with_fields(attachment=b"x" * 100),
    "long attachment": with_fields(attachment=bytes(1 << 21)),
}


def everywhere(changes: dict, kinds: list[Kind], quick: str) -> list:
    """Return each change of each kind; quick are one change of all kinds, and all changes of histograms."""
    return [
        pytest.param(
            kind,
            what,
            id=f"{kind.name}-{what}",
            marks=[] if what == quick or kind is Kind.HISTOGRAM else [pytest.mark.slow],
        )
        for kind in kinds
        for what in changes
    ]


@pytest.mark.parametrize(("kind", "what"), everywhere(NONSENSE, KINDS, "noise"))
def test_nonsense_from_a_site_at_every_exchange(federation, kind, what):
    outcomes = federation.run(job_with(kind), tamper={"site-2": at(kind, NONSENSE[what])})
    assert_failed_cleanly(federation, outcomes)


@pytest.mark.parametrize("what", MORE_NONSENSE)
def test_more_nonsense_in_a_histogram(federation, what):
    job = job_with(Kind.HISTOGRAM)
    outcomes = federation.run(job, tamper={"site-2": at(Kind.HISTOGRAM, MORE_NONSENSE[what], 2)})
    assert_failed_cleanly(federation, outcomes)
    assert what == "attachment" or all("site-2" in str(error) for error in outcomes.values())
    if what in ("nothing", "four billion values", "long attachment"):
        succeed(federation.run(job, "again"))  # nothing is broken


@pytest.mark.parametrize("profile", ["bfv", "ckks"])
@pytest.mark.parametrize("kind", OF_LATTICES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("what", ["halved", "flipped"])
def test_hostile_ciphertexts_and_keys(federation, profile, kind, what):
    changes = {
        "halved": lambda f: dataclasses.replace(f, payload=f.payload[: len(f.payload) // 2] or b"?"),
        "flipped": lambda f: dataclasses.replace(f, payload=bytes([f.payload[0] ^ 255]) + f.payload[1:]),
    }
    sender = "site-1" if kind in (Kind.HE_SECRET, Kind.HE_PUBLIC) else "site-2"
    job = dataclasses.replace(job_with(kind), profile=profile)
    outcomes = federation.run(job, tamper={sender: at(kind, on_frame(changes[what]))})
    assert_failed_cleanly(federation, outcomes)


NO_KEYS = {
    "nothing": lambda key: b"",
    "cut short": lambda key: key[: len(key) // 2],
    "longer": lambda key: key + b"\0",
    "noise": lambda key: bytes(255 - byte for byte in key),
}


@pytest.mark.parametrize("profile", ["bfv", "ckks"])
@pytest.mark.parametrize("what", NO_KEYS)
def test_a_key_that_is_no_key_leaves_no_run_behind(federation, monkeypatch, profile, what):
    """It is properly sealed: nothing of the rows has left anyone yet, so the same rows may train with other sites."""
    share = Session.share_secret

    def lie(session: Session, secret: bytes | None) -> bytes:
        shared = share(session, secret if secret is None else NO_KEYS[what](secret))
        return shared if secret is None else secret

    monkeypatch.setattr(Session, "share_secret", lie)
    frames: list = []
    outcomes = federation.run(small_job(profile=profile), frames=frames)
    assert_failed_cleanly(federation, outcomes)
    assert any(isinstance(outcomes[site], ProtocolError) for site in ("site-2", "site-3")), outcomes
    assert not private_frames(frames)
    assert [states(federation.workspace(site), site) for site in federation.sites] == [[]] * 3


@pytest.mark.parametrize("point", [bytes(32), (1).to_bytes(32, "little")], ids=["zero", "one"])
def test_a_session_key_of_small_order_leaves_no_run_behind(federation, monkeypatch, point):
    """Whoever knows the result of such a key would know the keys of the pair: the server could read what is sealed."""
    new = Hello.new

    def lie(identity: Identity, public_key: bytes, *rest: object) -> Hello:
        return new(identity, point if identity.site == "site-2" else public_key, *rest)

    monkeypatch.setattr(Hello, "new", lie)
    frames: list = []
    outcomes = federation.run(small_job(), frames=frames)
    assert_failed_cleanly(federation, outcomes)
    assert any(isinstance(e, ProtocolError) and "small order" in str(e) for e in outcomes.values()), outcomes
    assert not private_frames(frames)
    assert [states(federation.workspace(site), site) for site in federation.sites] == [[]] * 3


def test_a_replayed_frame_is_refused(federation):
    kept: list[bytes] = []

    def replay(data: bytes) -> bytes:
        if unpack(data).kind is Kind.HISTOGRAM:
            kept.append(data)
        return kept[0] if len(kept) > 1 else data

    outcomes = federation.run(job_with(Kind.HISTOGRAM), tamper={"site-3": replay})
    assert_failed_cleanly(federation, outcomes)


def test_a_peer_with_deeply_nested_terms_is_refused(federation, monkeypatch):
    real = agreement.Terms.to_bytes
    deep = pack_list([b"[" * 100_000] * 6)
    senders = iter([True])
    monkeypatch.setattr(agreement.Terms, "to_bytes", lambda self: deep if next(senders, False) else real(self))
    assert_failed_cleanly(federation, federation.run(small_job()))


# -- sites that die, servers that stall
# ---------------------------------------------------------------------------------


def die(data: bytes) -> bytes:
    raise SiteDied


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_site_that_dies_is_named_within_the_deadline(federation, kind):
    outcomes = federation.run(job_with(kind), tamper={"site-2": at(kind, die)})
    assert isinstance(outcomes["site-2"], SiteDied)
    assert all("no message from site-2" in str(outcomes[site]) for site in ("site-1", "site-3"))
    assert_failed_cleanly(federation, outcomes)


@pytest.mark.parametrize("kind", [Kind.HANDSHAKE, Kind.CUT_COUNTS, Kind.HISTOGRAM, Kind.CLOSING], ids=lambda k: k.name)
def test_a_server_that_stalls_is_left_in_time(federation, kind):
    """The server waits for site-2 far beyond the sites' own patience."""
    outcomes = federation.run(job_with(kind), tamper={"site-2": at(kind, die)}, deadline_s=600.0, patient=False)
    assert all(
        "no answer from the server in time" in str(outcomes[site]) or isinstance(outcomes[site], JobAborted)
        for site in ("site-1", "site-3")
    )
    assert_failed_cleanly(federation, outcomes)


def test_an_abort_in_the_middle_of_a_tree_ends_xgboost(federation):
    """As when an administrator aborts the job: XGBoost waits in a native call, which must end too."""
    transports: dict = {}

    def stop(data: bytes) -> bytes:
        transports["site-2"].abort("stopped by the operator")
        return data

    hooks = {"tamper": {"site-2": at(Kind.HISTOGRAM, stop, 3)}, "transports": transports}
    outcomes = federation.run(job_with(Kind.HISTOGRAM), **hooks)
    assert_failed_cleanly(federation, outcomes)
    assert all("stopped by the operator" in str(error) for error in outcomes.values())


def test_a_defect_of_the_sites_own_program_ends_the_job_everywhere(federation):
    def on_progress(site: str):
        def progress(record, n_rounds):
            if site == "site-3":
                raise RuntimeError("no space left for the progress bar")

        return progress

    outcomes = federation.run(job_with(Kind.HISTOGRAM), on_progress=on_progress)
    assert isinstance(outcomes.pop("site-3"), RuntimeError)
    assert_failed_cleanly(federation, outcomes)
    [log] = (federation.workspace("site-3") / "runs" / "job" / "evidence").glob("*.evidence.jsonl")
    assert '"aborted"' in log.read_text()


def test_lost_answers_cost_nothing(federation):
    """Every frame is sent twice, as after a lost answer: the same bytes get the same answer."""
    succeed(federation.run(small_job(), "once"))
    succeed(federation.run(small_job(), "twice", sends_twice=True))
    assert federation.model("once") == federation.model("twice")


# -- servers that lie
# ---------------------------------------------------------------------------------------------------


def shifted(frame: Frame) -> Frame:
    """Change the first word of a sum."""
    word = (int.from_bytes(frame.payload[:8], "little") + (1 << 58)) % 2**64
    return dataclasses.replace(frame, payload=word.to_bytes(8, "little") + frame.payload[8:])


def turned(frame: Frame) -> Frame:
    """Swap the sites' parts of a gathered answer."""
    parts = unpack_list(frame.payload, 3)
    return dataclasses.replace(frame, payload=pack_list([parts[1], parts[2], parts[0]]))


LIES: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: b"",
    "cut short": lambda data: data[:-1],
    "noise": lambda data: os.urandom(len(data)),
    "payload longer": on_frame(lambda f: dataclasses.replace(f, payload=f.payload + bytes(8))),
    "empty payload": with_fields(payload=b""),
    "other attempt": with_fields(attempt=bytes(16)),
    "other counter": with_fields(counter=1000),
    "other kind": with_fields(kind=Kind.HE_PUBLIC),
    "another scale": with_fields(type=FrameType.RESCALE, payload=b""),
    "a contribution": with_fields(type=FrameType.CONTRIBUTION),
    "attachment": with_fields(attachment=pack_list([b"x"] * 4)),
}


@pytest.mark.parametrize(("kind", "what"), everywhere(LIES, [Kind.CUT_COUNTS, Kind.HISTOGRAM], "cut short"))
def test_malformed_answers_of_the_server(federation, kind, what):
    lie = at(kind, LIES[what])
    outcomes = federation.run(job_with(kind), tamper_reply={"site-2": lie})
    assert_failed_cleanly(federation, outcomes)
    # A scale may change for histograms: site-2 then finds itself out of step with the others.
    is_step = LIES[what] is LIES["another scale"] and kind is Kind.HISTOGRAM
    assert isinstance(outcomes["site-2"], JobAborted if is_step else (ProtocolError, AuthenticationError))


@pytest.mark.parametrize("kind", SEALED_OR_SIGNED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("change", [shifted, turned])
@pytest.mark.parametrize("victims", [("site-2",), ("site-1", "site-2", "site-3")], ids=["one", "all"])
def test_changed_or_swapped_answers_between_sites_are_noticed(federation, kind, change, victims):
    if kind is Kind.CUT_PLAN:
        federation.run(job_with(kind), "earlier")  # only sites that know cuts already have a plan to compare
        if len(victims) == 3:
            pytest.skip("all sites then search again, which releases nothing new")
    replies = {site: at(kind, on_frame(change)) for site in victims}
    outcomes = federation.run(job_with(kind), tamper_reply=replies)
    for site in federation.sites:
        assert isinstance(outcomes[site], VeilBoostError), outcomes[site]
        assert not (federation.workspace(site) / "runs" / "job" / "model.json").exists()


@pytest.mark.parametrize(
    ("kind", "occurrence"), [(Kind.CUT_COUNTS, 3), (Kind.LABEL_MEAN, 1), (Kind.HISTOGRAM, 1), (Kind.ROOT_SUM, 1)]
)
def test_sums_that_differ_between_sites_are_noticed(federation, kind, occurrence):
    outcomes = federation.run(job_with(kind), tamper_reply={"site-2": at(kind, on_frame(shifted), occurrence)})
    assert_failed_cleanly(federation, outcomes)


def test_a_scale_that_no_site_needs_is_noticed(federation):
    def last_word_changed(frame: Frame) -> Frame:
        return dataclasses.replace(frame, payload=frame.payload[:-24] + bytes(8) + frame.payload[-16:])

    replies = {"site-2": at(Kind.SCALE, on_frame(last_word_changed))}
    outcomes = federation.run(job_with(Kind.SCALE), tamper_reply=replies)
    assert_failed_cleanly(federation, outcomes)
    assert "SCALE" in str(outcomes["site-2"]) and isinstance(outcomes["site-2"], (ProtocolError, AuthenticationError))


def test_a_server_cannot_hide_differing_models_by_echoing_each_sites_own_proof(federation, monkeypatch):
    """It tells site-2 other sums, and then answers everyone's comparison with that site's own proof."""
    believe_every_sum(monkeypatch)  # else its first lie ends the job
    monkeypatch.setattr(PairMacs, "check", lambda self, sender, message, place: message[: -self.size])  # and this too

    def liar(rank: int) -> Tamper:
        change_sum = at(Kind.HISTOGRAM, on_frame(shifted)) if rank == 1 else lambda data: data

        def tamper(data: bytes) -> bytes:
            frame = unpack(data)
            if frame.kind is Kind.MODEL_CHECK:
                own = unpack_list(bytes(frame.payload), 3)[rank]
                return dataclasses.replace(frame, payload=pack_list([own] * 3)).pack()
            return change_sum(data)

        return tamper

    params = {"objective": "binary:logistic", "max_depth": 1, "max_bin": 8, "eval_metric": []}
    outcomes = federation.run(
        small_job(params=params, num_rounds=1), tamper_reply={site: liar(r) for r, site in enumerate(federation.sites)}
    )
    assert_failed_cleanly(federation, outcomes)
    assert all("different results" in str(error) or isinstance(error, JobAborted) for error in outcomes.values())


def test_hostile_text_in_an_abort_is_only_text(federation):
    text = ("\x1b[31m{}%s" + "A" * 10_000).encode() + bytes([0, 255, 254])
    lie = with_fields(type=FrameType.ABORT, payload=text)
    outcomes = federation.run(small_job(), tamper_reply={"site-2": at(Kind.CUT_COUNTS, lie)})
    assert isinstance(outcomes["site-2"], JobAborted)
    assert all("\x1b" not in str(error) and len(str(error)) < 5000 for error in outcomes.values())


# -- what is refused before a private byte leaves
# -----------------------------------------------------------------------

UNSUPPORTED = {
    "approx": {"tree_method": "approx"},
    "exact": {"tree_method": "exact"},
    "gblinear": {"booster": "gblinear"},
    "ranking": {"objective": "rank:ndcg"},
    "survival": {"objective": "survival:cox"},
    "aft": {"objective": "survival:aft"},
    "refresh": {"process_type": "update"},
    "updater": {"updater": "refresh"},
    "gpu": {"device": "cuda"},
    "sampling": {"sampling_method": "gradient_based"},
    "broadcast": {"debug_synchronize": True},
    "cache": {"max_cached_hist_node": 1},
    "margin": {"base_margin": [0.0]},
    "typo": {"max_dept": 3},
    "weights": {"feature_weights": [1, 2, 3]},
    "two quantiles": {"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.9]},
    "metric": {"eval_metric": "ndcg"},
    "custom": {"objective": "my:own"},
}


def private_frames(frames: list[tuple[str, bytes]]) -> list[str]:
    """Return the sums among the frames; what is sealed between sites holds names and keys, nothing of rows."""
    unpacked = [unpack(data) for _, data in frames]
    return [f.kind.name for f in unpacked if f.operation is Operation.SUM]


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_unsupported_parameters_are_refused_before_anything_is_sent(federation, what):
    frames: list = []
    base = {"objective": "binary:logistic", "max_bin": 8}
    outcomes = federation.run(small_job(params={**base, **UNSUPPORTED[what]}), frames=frames)
    assert_failed_cleanly(federation, outcomes)
    [name] = [key for key in UNSUPPORTED[what] if key != "quantile_alpha"] or ["quantile_alpha"]
    refusals = [str(e) for e in outcomes.values() if isinstance(e, ConfigurationError)]
    value = str(UNSUPPORTED[what][name])
    assert refusals and all(name in text or value in text or "quantile_alpha" in text for text in refusals)
    assert not frames


def give(federation: Federation, site: str, frame: pd.DataFrame) -> None:
    frame.to_parquet(federation.workspace(site) / "train.parquet", index=False)


OTHER_DATA = {
    "column": (lambda f: f.rename(columns={"b": "b2"}), "b2"),
    "order": (lambda f: f[["b", "a", "c", "y"]], "'b'"),
    "more": (lambda f: f.assign(z=1.0), "'z'"),
    "fewer": (lambda f: f.drop(columns="c"), "'c'"),
}


@pytest.mark.parametrize("what", OTHER_DATA)
def test_other_columns_are_refused_by_name_before_a_private_byte(federation, what):
    change, name = OTHER_DATA[what]
    give(federation, "site-2", change(small_table().iloc[:20]))
    frames: list = []
    outcomes = federation.run(small_job(), frames=frames)
    assert_failed_cleanly(federation, outcomes)
    refusals = [str(e) for e in outcomes.values() if isinstance(e, ConfigurationError)]
    assert refusals and all(name in text for text in refusals)
    assert not private_frames(frames)


# Each site reads the job from the same server; a changed one at one site must still be found.
OTHER_JOBS = {
    "categories": {"categories": {"a": ["0", "1"]}, "unknown_category_is_missing": True},
    "label_classes": {"label_classes": ["1", "0"]},
    "parameters": {"params": {"objective": "binary:logistic", "eta": 0.1}},
    "profile": {"profile": "bfv"},
    "rounds": {"num_rounds": 9},
}


@pytest.mark.parametrize("what", OTHER_JOBS)
def test_another_job_at_one_site_is_refused_before_a_private_byte(federation, monkeypatch, what):
    real = support.run_site

    def run_site(job, place, *rest):
        return real(small_job(**OTHER_JOBS[what]) if place.site == "site-2" else job, place, *rest)

    monkeypatch.setattr(support, "run_site", run_site)
    frames: list = []
    outcomes = federation.run(small_job(), frames=frames)
    assert_failed_cleanly(federation, outcomes)
    assert any(isinstance(e, (ConfigurationError, ProtocolError)) for e in outcomes.values())
    assert not private_frames(frames)


@pytest.mark.parametrize("package", ["xgboost", "veilboost"])
def test_another_version_at_one_site_is_refused_before_a_private_byte(federation, monkeypatch, package):
    real_run, real_versions, this = support.run_site, agreement.versions, threading.local()

    def run_site(job, place, *rest):
        this.site = place.site
        return real_run(job, place, *rest)

    def versions():
        return {**real_versions(), **({package: "3.2.99"} if this.site == "site-2" else {})}

    monkeypatch.setattr(support, "run_site", run_site)
    monkeypatch.setattr(site_module, "versions", versions)
    frames: list = []
    outcomes = federation.run(small_job(), frames=frames)
    assert_failed_cleanly(federation, outcomes)
    assert any(isinstance(e, ConfigurationError) and f"{package} 3.2.99" in str(e) for e in outcomes.values())
    assert not private_frames(frames)


def test_a_run_that_one_registry_refuses_is_remembered_nowhere(federation):
    """Otherwise the other sites could not train again without the one that refuses."""
    for site in federation.sites:
        federation.write_policy(site, consents={})
    succeed(federation.run(small_job(cuts="quantile"), "first"))
    give(federation, "site-3", small_table().iloc[41:60])  # one row less: site-3's registry refuses
    before = {site: states(federation.workspace(site), site) for site in federation.sites}
    outcomes = federation.run(small_job(cuts="quantile"), "second")
    assert any("recompute_with_changes" in str(e) for e in outcomes.values())
    assert {site: states(federation.workspace(site), site) for site in federation.sites} == before
    assert all(before.values())


def test_a_web_proxy_never_sees_xgboosts_messages(federation, monkeypatch):
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.1)
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        succeed(federation.run(small_job()))
        with pytest.raises(TimeoutError):
            proxy.accept()
