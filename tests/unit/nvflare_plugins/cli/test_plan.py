"""The plan: exact sizes against recorded traces of XGBoost and real processors, and sums of known numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.plan import Network
from nvflare_plugins.attempt.session import open_session
from nvflare_plugins.cli.main import main
from nvflare_plugins.evidence.threat_model import leakage_class
from nvflare_plugins.flare.kinds import KINDS, JobKind, read_job
from nvflare_plugins.kinds.bagging.model import SharedTree
from nvflare_plugins.kinds.horizontal.planner import assumptions, figures, render
from nvflare_plugins.kinds.vertical import planner as vertical_module
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.mediated.training import training_shape
from nvflare_plugins.pooled.plan import (
    ProtectionRate,
    TreeRate,
    Workload,
    built_nodes,
    estimate,
    measure_protection,
    measure_trees,
    message_bytes,
    pairs_are_wide,
    payload_bytes,
    round_messages,
    session_bytes,
    setup_messages,
    workload_of_job,
)
from nvflare_plugins.pooled.processors import BUILT_IN
from nvflare_plugins.pooled.value_bounds import coarsest_pairs
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.envelope import CHUNK_BYTES, Kind
from nvflare_plugins.wire.sums import Family, ProtectedSums
from nvflare_plugins.xgb.parameters import check_parameters
from tests.support.federation import DirectTransport
from tests.support.sessions import Policy, names
from tests.support.threads import in_threads
from tests.unit.nvflare_plugins.cli.test_plan_vertical import RATES

TRACES = json.loads((Path(__file__).parents[3] / "golden" / "horizontal_traces.json").read_text())
FLOAT64, SUM = 2, 2


def histogram_sizes(trace: dict, phase: str, number: int) -> list[int]:
    """Return the sizes in bytes of the histogram messages that XGBoost sent in one update."""
    [messages] = [m for name, index, m in trace["phases"] if (name, index) == (phase, number)]
    one = 16 * trace["n_bins"]
    return [size for _, dtype, op, size in messages if (dtype, op) == (FLOAT64, SUM) and size % one == 0]


@pytest.mark.parametrize(
    ("case", "workload"),
    [
        ("logistic", Workload(1000, 1, depth=3)),
        ("weighted", Workload(1000, 1, depth=3)),
        ("softprob", Workload(1000, 1, depth=3, outputs=3)),
        ("forest", Workload(1000, 1, depth=3, parallel_trees=2)),
        ("lossguide", Workload(1000, 1, depth=0, max_leaves=6)),
        ("stump", Workload(1000, 1, depth=1)),
    ],
)
def test_histogram_messages_are_those_that_xgboost_sends(case, workload):
    trace = TRACES[case]
    planned = [16 * trace["n_bins"] * n for n in built_nodes(workload)] * workload.trees_per_round
    assert histogram_sizes(trace, "update", 1) == planned


def test_trees_that_are_not_full_send_no_more_than_planned():
    sent = histogram_sizes(TRACES["deep"], "update", 1)
    planned = [16 * TRACES["deep"]["n_bins"] * n for n in built_nodes(Workload(1000, 1, depth=7))]
    assert all(a <= b for a, b in zip(sent, planned, strict=True)) and sent != planned


def test_credit_card_tree_has_the_known_number_of_values():
    # 16 built nodes x 28 features x 256 bins x (g, h)
    workload = Workload(rows=284_807, features=28, bins=256, depth=5)
    assert sum(m.messages * m.n_values for m in round_messages(workload) if m.kind is Kind.HISTOGRAM) == 229_376


@pytest.mark.parametrize(
    ("workload", "nodes"),
    [
        (Workload(10_000, 1, depth=1), [1]),
        (Workload(10_000, 1, depth=5), [1, 1, 2, 4, 8]),
        (Workload(10_000, 1, depth=11), [1, 1, 2, 4, 8, 16, 32, 64, 128, 256, 256, 256]),
        (Workload(8, 1, depth=9), [1, 1, 2, 4, 4, 4, 4, 4, 4]),
        (Workload(10_000, 1, depth=0, max_leaves=4), [1, 1, 1]),
    ],
)
def test_built_nodes(workload, nodes):
    assert built_nodes(workload) == nodes


def test_messages_of_a_multiclass_round_with_missing_values():
    workload = Workload(1000, 4, bins=16, depth=3, outputs=3, metrics=2, missing=True)
    found = {(m.kind, m.n_values): m.messages for m in round_messages(workload)}
    assert found == {(Kind.HISTOGRAM, 128): 6, (Kind.HISTOGRAM, 256): 3, (Kind.ROOT_SUM, 2): 3, (Kind.METRIC, 9): 2}


def test_cut_search_takes_32_steps_and_public_bounds_none():
    searched = [m for m in setup_messages(Workload(1000, 4, bins=16)) if m.kind is Kind.CUT_COUNTS]
    assert [(m.messages, m.n_values) for m in searched] == [(1, 5), (1, 4), (32, 4 * 14)]
    public = [m for m in setup_messages(Workload(1000, 4, bins=16, cuts="uniform")) if m.kind is Kind.CUT_COUNTS]
    assert [(m.messages, m.n_values) for m in public] == [(1, 5)]


@pytest.mark.parametrize("n_values", [1, 4096, 4097, 20_000])
def test_payload_sizes_are_those_of_the_processors(n_values):
    from he_processors.bfv import BfvProcessor
    from he_processors.ckks import CkksProcessor

    values = np.arange(n_values, dtype=np.int64)
    assert payload_bytes("plain", n_values) == values.nbytes
    assert payload_bytes("masks", n_values) == values.nbytes + 16, "and a pair of tags"
    for profile, processor in (("bfv", BfvProcessor), ("ckks", CkksProcessor)):
        key = processor(processor.generate(2))
        assert payload_bytes(profile, n_values) == len(key.encrypt(values)) + 16
    with pytest.raises(ConfigurationError):
        payload_bytes("magic", n_values)


@pytest.mark.parametrize("profile", ["plain", "masks"])
def test_words_of_32_bits_halve_the_bytes_of_histograms_in_a_round(profile):
    params = {"objective": "binary:logistic", "eval_metric": ["auc", "logloss"]}
    found = {}
    for bits in (32, 64):
        job = HorizontalJob("d", "y", params, word_bits=bits, evaluate_training=True)
        workload = workload_of_job(job, 500_000, 28, 3, missing=False)
        first, later = (list(round_messages(workload, profile, is_first=is_first)) for is_first in (True, False))
        tails = 16 * (profile == "masks")
        found[bits] = sum(m.messages * (message_bytes(m, profile) - tails) for m in first)
        assert {m.kind for m in first} == {Kind.HISTOGRAM} and later[0].kind is Kind.HISTOGRAM_METRIC
        riding = [sum(m.messages * message_bytes(m, profile) for m in planned) for planned in (first, later)]
        assert riding[1] - riding[0] == 8 * (4 + 4)
    assert 2 * found[32] == found[64] > 1 << 20
    said = "\n".join(assumptions(workload_of_job(replace(job, word_bits=32), 500_000, 28, 3, missing=False), Network()))
    assert "words of 32 bits under plain and masks (word_bits)" in said


def test_words_of_32_bits_are_planned_for_no_more_rows_than_a_job_takes():
    job = HorizontalJob("d", "y", {"objective": "binary:logistic"}, word_bits=32)
    assert workload_of_job(job, 524_287, 28, 3, missing=False).word_bits == 32
    with pytest.raises(ConfigurationError, match=r"fewer than 524,288 pooled rows here: .*Set word_bits to 64"):
        workload_of_job(job, 524_288, 28, 3, missing=False)


@pytest.mark.parametrize(("profile", "widest_narrow"), [("ckks", 1 << 18), ("bfv", 1 << 24)])
def test_histograms_are_wide_from_as_many_rows_as_in_a_job(profile, widest_narrow):
    """The plan once said half the bytes that ckks sends above 262,144 rows a site."""
    from he_processors.bfv import BfvProcessor
    from he_processors.ckks import CkksProcessor
    from nvflare_plugins.wire.profiles import BfvSums, CkksSums

    processor = {"bfv": BfvProcessor, "ckks": CkksProcessor}[profile]
    sums_of = {"bfv": BfvSums, "ckks": CkksSums}[profile]
    scheme = sums_of(processor(processor.generate(3)), None)
    for rows_per_site, is_wide in ((widest_narrow, False), (widest_narrow + 1, True)):
        sums = ProtectedSums(SimpleNamespace(world=3), scheme, None)
        sums._secure_maximum = lambda exponents: exponents
        bounds = {Family.GRADIENTS: float(rows_per_site), Family.HESSIANS: rows_per_site / 4}
        sums.agree_scales(
            bounds, coarsest_pairs(check_parameters({"objective": "binary:logistic"}, ["a"]), weighted=False)
        )
        assert sums._is_wide((Family.GRADIENTS,)) == is_wide, "the job itself does otherwise"
        workload = Workload(3 * rows_per_site, 1, bins=16, depth=1)
        assert pairs_are_wide(workload, profile) == is_wide and not pairs_are_wide(workload, "masks")
        found = {m.kind: m.wide for m in round_messages(workload, profile)}
        assert found[Kind.HISTOGRAM] == is_wide
    narrow, wide = (
        estimate(Workload(3 * rows, 28), profile, Network(), TreeRate(1.0, 0.0), ProtectionRate(1e-8, 1e-9), 0)
        for rows in (widest_narrow, widest_narrow + 1)
    )
    assert wide.round_bytes > 1.9 * narrow.round_bytes and wide.protect_s > 1.9 * narrow.protect_s


def test_a_larger_gradient_makes_histograms_wide_earlier():
    params = {"objective": "binary:logistic", "scale_pos_weight": 8.0}
    job = HorizontalJob.from_dict({**JOB, "params": params, "engine": "xgboost"})
    workload = workload_of_job(job, 3 * 40_000, 6, 3, missing=False)
    assert workload.pair_bound == 8.0 and pairs_are_wide(workload, "ckks")
    assert not pairs_are_wide(workload_of_job(job, 3 * 32_000, 6, 3, missing=False), "ckks")


def test_estimate_of_known_numbers():
    # One message of 2 x 16 values x 8 bytes per round (depth 1, 1 feature, 16 bins) and one metric of 2 values and 2
    # flags; 2 tags in each.
    workload = Workload(rows=90, features=1, bins=16, depth=1, sites=3, rounds=10, cuts="uniform")
    network = Network(latency_s=0.5, site_bytes_per_s=1e3, server_bytes_per_s=1e3)
    result = estimate(workload, "masks", network, TreeRate(1.0, 0.1), ProtectionRate(0.01, 0.001), 1000)
    assert result.round_bytes == (32 + 2) * 8 + (4 + 2) * 8
    assert result.xgboost_s == pytest.approx(1.0 + 0.1 * 30)
    assert result.protect_s == pytest.approx(34 * (0.01 + 3 * 0.001))
    # The server's link carries all three sites' bytes, each way.
    assert result.network_s == pytest.approx(2 * 0.5 + 2 * 3 * (272 + 48) / 1e3)
    setup_values = 2 + (2 + 4) + 5 * 385 + 1 + 1
    n_tags = 2 * 5
    assert (
        result.total_bytes == 10 * 320 + 8 * (setup_values + n_tags) and result.server_bytes == 6 * result.total_bytes
    )
    assert result.total_s == pytest.approx(result.setup_s + 10 * result.round_s)
    assert result.site_memory > 1000 and result.server_memory > 1000


def test_the_servers_memory_follows_the_message_and_not_the_sites_under_masks():
    rates = (Network(), TreeRate(1e-3, 1e-8), ProtectionRate(1e-8, 1e-9), 0)
    few, many = (estimate(Workload(10_000, 400, 256, 6, n, 5), "masks", *rates) for n in (3, 300))
    payload = max(message_bytes(m, "masks") for m in round_messages(Workload(10_000, 400, 256, 6, 3, 5)))
    assert few.server_memory == 3 * payload + 3 * CHUNK_BYTES and payload > 10 * CHUNK_BYTES
    assert many.server_memory == 3 * payload + 300 * CHUNK_BYTES


@pytest.mark.parametrize(("bins", "missing", "per_value"), [(256, False, 3), (256, True, 6), (300, False, 4)])
def test_a_table_that_is_read_in_passes_takes_less(bins, missing, per_value):
    rates = (Network(), TreeRate(1e-3, 1e-8), ProtectionRate(1e-8, 1e-9), 0)
    rows, features = 300_000, 50
    planned = estimate(Workload(rows, features, bins, 6, 3, 5, missing=missing), "masks", *rates)
    assert planned.passes_memory - planned.external_memory == rows // 3 * features * per_value
    assert planned.site_memory - planned.passes_memory == rows // 3 * (
        features * (8 + (bins > 256) + 1 - per_value) - 84
    )


@pytest.mark.parametrize("world", [2, 5, 9])
def test_what_a_session_brings_a_site_grows_with_the_sites(world):
    """Unsigned sessions, without certificates, bring less than the plan says, and grow as it says."""
    aggregator, received = Aggregator(names(world), bytes(16), 60.0), {}

    class Counting(DirectTransport):
        def exchange(self, frame, timeout_s):
            answer = super().exchange(frame, timeout_s)
            received[self._site] = received.get(self._site, 0) + len(answer)
            return answer

    def take_part(rank):
        site = names(world)[rank]
        channel = Channel(site, names(world), "job", bytes(16), Counting(aggregator, site), 60.0)
        open_session(channel, Identity.unsigned(site), Policy(True), "horizontal", bytes(32))

    in_threads(take_part, range(world))
    assert len(received) == world
    assert 300 * world < received["site-1"] < session_bytes(world)
    assert received["site-1"] < 600 * world + 1000, "more than in proportion to the sites"


@pytest.mark.parametrize("profile", BUILT_IN)
def test_more_of_anything_never_costs_less(profile):
    rates = (Network(), TreeRate(1e-3, 1e-8), ProtectionRate(1e-8, 1e-9), 0)
    base = Workload(10_000, 10, 32, 4, 3, 5)
    fewer = estimate(base, profile, *rates)
    for change in ("rows", "features", "bins", "depth", "rounds", "outputs", "parallel_trees", "metrics"):
        workload = Workload(**{**_fields(base), change: 2 * getattr(base, change)})
        more = estimate(workload, profile, *rates)
        for name in ("total_s", "total_bytes", "site_memory", "passes_memory", "external_memory", "server_memory"):
            assert getattr(more, name) >= getattr(fewer, name), (change, name)


def _fields(workload: Workload) -> dict:
    return {name: getattr(workload, name) for name in Workload.__dataclass_fields__}


@pytest.mark.parametrize(
    "wrong", [{"rows": 0}, {"features": 0}, {"sites": 0}, {"bins": 1}, {"depth": -1}, {"depth": 0}, {"rounds": 0}]
)
def test_impossible_workloads_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        Workload(**{"rows": 10, "features": 2, **wrong})


def test_leakage_class_names_who_opens_a_contribution():
    assert leakage_class("plain", 5) == "server alone"
    assert leakage_class("ckks", 5) == "server + 1 site"
    assert leakage_class("masks", 5) == leakage_class("bfv", 5) == "4 sites together"
    assert leakage_class("masks", 2) == "the other site (W = 2)"


@pytest.mark.parametrize("profile", BUILT_IN)
def test_rates_are_measured(profile):
    rate = measure_protection(profile, 3)
    assert 0 < rate.site_s < 1e-3 and 0 <= rate.server_s < 1e-3


def test_tree_rate_is_measured_on_the_workloads_shape():
    assert measure_trees(Workload(3000, 5, 16, 3)).seconds(1000) > 0


def job_folder(folder: Path, job: dict, controller: str = "JobController") -> Path:
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    document = {
        "format_version": 2,
        "workflows": [
            {
                "id": "c",
                "path": f"nvflare_plugins.flare.controller.{controller}",
                "args": {"kind": "horizontal", "job": job},
            }
        ],
    }
    (config / "config_fed_server.json").write_text(json.dumps(document))
    return folder


JOB = {
    "data_set": "d",
    "label": "y",
    "num_rounds": 7,
    "eval_data_set": "e",
    "cuts": "uniform",
    "cut_bounds": {"f0": [0, 1]},
    "params": {
        "objective": "multi:softprob",
        "num_class": 4,
        "max_depth": 3,
        "max_bin": 32,
        "num_parallel_tree": 2,
        "eval_metric": ["mlogloss", "merror"],
    },
}


def test_shape_is_taken_from_a_job_folder(tmp_path):
    job = read_job(job_folder(tmp_path, JOB))
    assert job == HorizontalJob.from_dict(JOB)
    assert workload_of_job(job, 1000, 6, 5, missing=False) == Workload(
        1000,
        6,
        bins=32,
        depth=3,
        sites=5,
        rounds=7,
        outputs=4,
        parallel_trees=2,
        metrics=2,
        cuts="uniform",
        row_sets=2,
        grown=True,
        metrics_wait=False,
    )


def test_folders_without_a_job_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="not the folder of a VeilBoost job"):
        read_job(tmp_path)
    with pytest.raises(ConfigurationError, match="not the folder of a VeilBoost job"):
        read_job(job_folder(tmp_path / "b", {"data_set": "d", "label": "y"}, "OtherController"))
    (tmp_path / "b" / "app" / "config" / "config_fed_server.json").write_text("{")
    with pytest.raises(ConfigurationError, match="not valid JSON"):
        read_job(tmp_path / "b")


def cli(*arguments: object) -> int:
    return main(["plan", *map(str, arguments)])


def test_command_line(tmp_path, capsys):
    assert cli("--rows", 1000, "--features", 4, "--bins", 16, "--depth", 2) == 0
    text = capsys.readouterr().out
    assert "server + 1 site" in text and "Assumed:" in text and "ckks" in text
    folder = job_folder(tmp_path, JOB)
    assert cli(folder, "--rows", 1000, "--features", 4, "--profile", "masks", "--depth", 2, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["workload"]["outputs"] == 4 and document["workload"]["depth"] == 2
    assert [e["profile"] for e in document["estimates"]] == ["masks"] and document["assumptions"]
    assert cli("--rows", 0, "--features", 4) == 1
    assert cli(tmp_path / "nowhere", "--rows", 10, "--features", 4) == 1
    assert cli("--rows", 10, "--features", 4, "--latency-ms", 0) == 1


def test_text_and_json_say_the_same():
    workload, network = Workload(1000, 4, 16, 3), Network()
    result = estimate(workload, "masks", network, TreeRate(1e-3, 1e-8), ProtectionRate(1e-8, 1e-9), 0)
    assert figures(workload, network, [result])["estimates"][0]["total_s"] == result.total_s
    assert f"{result.total_s:.3g} s" in render(workload, network, [result])


REPOSITORY = Path(__file__).parents[4]


def test_private_jobs_are_priced_without_data(capsys):
    assert cli(REPOSITORY / "jobs" / "private_trees_default") == 0
    text = capsys.readouterr().out
    assert "epsilon 0.5 at delta 1e-06" in text and "noise on a leaf" in text
    assert cli(REPOSITORY / "jobs" / "private_trees_default", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    spent = document["epsilon_after_rounds"]
    assert spent == sorted(spent) and 0.49 < spent[-1] <= 0.5


def test_private_jobs_over_too_few_sites_are_refused(capsys):
    assert cli(REPOSITORY / "jobs" / "private_trees_default", "--sites", 1) == 1
    assert "veilboost plan:" in capsys.readouterr().err


def test_vertical_jobs_need_the_columns_of_the_other_parties(capsys, monkeypatch):
    monkeypatch.setattr(
        vertical_module, "measure_ciphers", lambda workload: RATES
    )  # test_plan_vertical.py measures them
    folder = REPOSITORY / "jobs" / "vertical_paillier"
    assert cli(folder, "--rows", 100, "--features", 3) == 1
    assert "--foreign-features" in capsys.readouterr().err
    assert cli(folder, "--rows", 100, "--features", 3, "--foreign-features", 2, 2, "--key-bits", 2048) == 0
    assert "depth 3; Paillier-2048" in capsys.readouterr().out


def test_every_kind_has_a_plan_or_a_reason_of_its_own():
    reasons = [kind.planner for kind in KINDS.values() if isinstance(kind.planner, str)]
    assert len(reasons) == 2 and JobKind.__dataclass_fields__["planner"].default not in reasons


def test_a_kind_without_a_plan_says_why(capsys):
    assert cli(REPOSITORY / "jobs" / "alignment") == 1
    assert "alignment jobs have no plan: it takes about" in capsys.readouterr().err


def test_bagging_sends_as_many_bytes_as_its_plan_says(capsys):
    folder = REPOSITORY / "jobs" / "bagging"
    assert cli(folder, "--sites", 4, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    stump = {"left_children": [-1], "right_children": [-1], "split_indices": [0], "split_conditions": [0.5]}
    message = SharedTree.of({**stump, "default_left": [0]}).to_bytes(figures["depth"])
    assert figures["bytes_sent_per_round"] == len(message)
    assert figures["bytes_received_per_round"] == 4 * len(message)
    assert cli(folder) == 0
    assert "whatever its tree" in capsys.readouterr().out


def test_a_profile_says_what_it_shows_and_needs_the_number_of_columns(capsys):
    folder = REPOSITORY / "jobs" / "profile"
    assert cli(folder) == 1 and "--features" in capsys.readouterr().err
    assert cli(folder, "--features", 30, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["bytes_sent"] > 30 * 254 * 32 * 8 and figures["exchanges"] > 33
    assert cli(folder, "--features", 30) == 0
    shown = capsys.readouterr().out
    assert "bins of at least 10 of every class" in shown and "does not search again" in shown


def test_pooled_metrics_are_priced_and_said(capsys):
    job = HorizontalJob("d", "y", {"objective": "binary:logistic"}, eval_data_set="e", pooled_metrics=True)
    with_metrics = workload_of_job(job, 1000, 3, 3, missing=False)
    without = replace(with_metrics, pooled_metrics=False)
    rates = (Network(), TreeRate(1.0, 0.0), ProtectionRate(1e-8, 1e-9), 0)
    more, less = (estimate(one, "masks", *rates) for one in (with_metrics, without))
    assert more.total_bytes - less.total_bytes == 8 * (2 * 64 + 2) and more.setup_s > less.setup_s
    assert any("score_histogram" in line for line in assumptions(with_metrics, Network()))
    assert not any("score_histogram" in line for line in assumptions(without, Network()))


def test_dpboost_is_priced_as_its_ledger_will_be(capsys):
    folder = REPOSITORY / "jobs" / "dpboost"
    job = read_job(folder)
    assert cli(folder, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    spent = figures["n_ensembles"] * (job.depth * figures["epsilon_of_a_level"] + figures["epsilon_of_leaves"])
    assert spent * job.rows_per_person == pytest.approx(job.epsilon) and spent * job.rows_per_person <= job.epsilon
    assert figures["n_messages"] == job.n_trees * (job.depth + 1)
    first, last = figures["noise_on_first_and_last_leaf"]
    # g* / (1 + lambda) before clipping decides, 2 g* (1 - eta)^t after
    assert first == pytest.approx(min(1 / (1 + job.ridge), 2) / figures["epsilon_of_leaves"])
    late = 2 * (1 - job.learning_rate) ** (job.n_trees // figures["n_ensembles"] - 1)
    assert last == pytest.approx(min(1 / (1 + job.ridge), late) / figures["epsilon_of_leaves"])
    assert cli(folder) == 0
    assert f"pure epsilon {job.epsilon:g}" in capsys.readouterr().out


def test_buckets_are_priced_for_a_value_and_for_a_row(capsys):
    folder = REPOSITORY / "jobs" / "federboost_vertical"
    assert cli(folder) == 1
    assert "--features, the columns of a passive party" in capsys.readouterr().err
    assert cli(folder, "--features", 5, "--rows", 100, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["epsilon_of_a_value"] == pytest.approx(3.6) and figures["epsilon_of_a_row"] == 20.0
    assert figures["wrong_bucket_rate"] == pytest.approx(15 / (15 + np.exp(3.6))) and figures["bytes_sent"] == 500
    assert cli(folder, "--features", 5) == 0
    assert "is right in 100 % of cases" in capsys.readouterr().out, "a row is hardly protected, and one is told"


def test_rows_and_features_are_asked_for(capsys):
    assert cli("--rows", 100) == 1
    assert "give --rows and --features" in capsys.readouterr().err


@pytest.mark.parametrize("depth", range(1, 13))
@pytest.mark.parametrize("leaves", [0, 31])
def test_the_plan_and_the_training_agree_on_the_largest_message(depth: int, leaves: int) -> None:
    params: dict[str, object] = {"objective": "binary:logistic", "max_depth": depth}
    if leaves:
        params |= {"grow_policy": "lossguide", "max_leaves": leaves}
    shape = training_shape(check_parameters(params, ["a"]), 3, 1, 256, weighted=False, n_eval_sets=0, continued=False)
    planned = built_nodes(Workload(rows=1 << 20, features=1, depth=depth, max_leaves=leaves))
    assert max(planned) == shape.max_built_nodes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workers", "4"], "belongs to plans of vertical, vertical_tuning jobs"),
        (["--budget", "1,1e-6"], "belong to differentially private"),
    ],
)
def test_options_of_another_kind_of_job_are_refused(options, words, capsys):
    assert main(["plan", "--rows", "1000", "--features", "5", *options]) == 1
    assert words in capsys.readouterr().err
