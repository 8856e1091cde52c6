"""The plan of a vertical training: counts that a person can check, monotone, and refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from he_processors.curve.registry import available_backends
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.formatting import human_bytes
from nvflare_plugins.cli.main import main
from nvflare_plugins.kinds.vertical import planner as vertical_module
from nvflare_plugins.kinds.vertical.job import VerticalJob
from nvflare_plugins.kinds.vertical.planner import (
    INNER_BYTES_PER_S,
    CipherRates,
    VerticalWorkload,
    estimate_vertical,
    estimate_workers,
    lists_of_parties,
    measure_sealed,
    noise_figures,
    noise_lines,
    planned_sums,
    render_vertical,
    render_workers,
)
from nvflare_plugins.recipes.recipe import TuningRecipe, write_folder

RATES = CipherRates(
    encrypt_s=1e-3,
    receive_s=1e-6,
    add_s=1e-4,
    pack_s=1e-2,
    open_s=1e-1,
    pairs_per_ciphertext=10,
    ciphertext_bytes=512,
    partial_bytes=512,
)
PARAMS = {"objective": "binary:logistic", "max_depth": 3}
BASE = VerticalWorkload(1000, 3, (2, 4), bins=9, depth=3, trees=5, key_bits=2048)


def test_counts_of_a_full_tree():
    # Built: the root, one child of the first pair, two of the second level's: 1 + 1 + 2; rows 1000 + 500 + 500.
    assert BASE.built_nodes == 4 and BASE.built_rows == 2000
    estimate = estimate_vertical(BASE, RATES, 1e6, 0)
    first, second = estimate.passives
    assert estimate.encrypt_s == pytest.approx(1.0)
    assert first.histogram_s == pytest.approx(2000 * 2 * 1e-4)
    assert second.pack_s == pytest.approx(4 * 4 * 10 * 1e-2)
    assert estimate.open_s == pytest.approx(4 * (2 + 4) * 10 * 1e-1)
    assert first.bytes_in == 512_000 and second.bytes_out == 16 * 512
    assert estimate.network_s == pytest.approx((2 * 512_000 + (8 + 16) * 512) / 1e6)
    assert estimate.core_s == pytest.approx(1.0 + estimate.open_s + first.core_s + second.core_s)


def test_a_category_has_a_bin_of_its_own_and_max_bin_does_not_count():
    fields = {name: getattr(BASE, name) for name in VerticalWorkload.__dataclass_fields__}
    workload = VerticalWorkload(**{**fields, "categories": ((3,), (2, 700))})
    first, second = estimate_vertical(workload, RATES, 1e6, 0).passives
    assert first.pack_s == pytest.approx(4 * (4 + 10) * 1e-2)
    assert second.pack_s == pytest.approx(4 * (3 + 701 + 2 * 10) * 1e-2)
    assert estimate_vertical(workload, RATES, 1e6, 0).open_s == pytest.approx(4 * (14 + 724) * 1e-1)
    with pytest.raises(ConfigurationError, match="in order of their names"):
        VerticalWorkload(**{**fields, "categories": ((3, 3, 3),)})


def test_a_jobs_categories_are_its_parties_by_name():
    colours = ["red", "blue", "green"]
    lists = {"site-1": {"own": colours}, "site-3": {"size": [1, 2]}, "site-2": {"colour": colours}}
    job = VerticalJob(active="site-1", data_set="credit", label="y", num_rounds=1, categories=lists)
    assert lists_of_parties(job, 2) == ((3,), (2,))
    with pytest.raises(ConfigurationError, match="for each"):
        lists_of_parties(job, 1)


def test_more_of_anything_never_costs_less():
    fields = {name: getattr(BASE, name) for name in VerticalWorkload.__dataclass_fields__}
    fewer = estimate_vertical(BASE, RATES, 1e6, 0)
    for change in ({"rows": 2000}, {"own": 6}, {"foreign": (4, 8)}, {"bins": 18}, {"depth": 4}):
        more = estimate_vertical(VerticalWorkload(**{**fields, **change}), RATES, 1e6, 0)
        assert more.core_s >= fewer.core_s and more.active_memory >= fewer.active_memory
        assert all(a.memory >= b.memory for a, b in zip(more.passives, fewer.passives, strict=True))


def test_a_passive_partys_memory_is_that_of_its_bins_in_the_making_or_of_training():
    """Measured: 13.1 bytes a value where the table is held, 2.7 in passes with bins of one byte."""
    rows, many = 100_000, 2000
    wide = estimate_vertical(replace(BASE, rows=rows, foreign=(many,)), RATES, 1e6, 7).passives[0]
    assert wide.memory == 7 + rows * many * 131 // 10 and wide.passes_memory == 7 + rows * many * 27 // 10
    larger = estimate_vertical(replace(BASE, rows=rows, foreign=(many,), bins=300), RATES, 1e6, 7).passives[0]
    assert larger.passes_memory == 7 + rows * many * 37 // 10
    narrow = estimate_vertical(replace(BASE, rows=rows, foreign=(2,)), RATES, 1e6, 7).passives[0]
    assert narrow.memory - narrow.passes_memory == rows * 2 * 4 and narrow.passes_memory > rows * RATES.in_memory
    assert wide.memory > larger.passes_memory > wide.passes_memory > narrow.passes_memory
    said = render_vertical(BASE, RATES, estimate_vertical(BASE, RATES, 1e6, 7), 1e6)
    assert "data_sets.<name>.memory" in said and said.count("passive party 2  ") == 2


@pytest.mark.parametrize(("foreign", "held", "in_passes"), [(1, 10.0, 9.0), (1200, 10.0, 9.0)])
def test_the_label_owners_memory_is_that_of_its_table_and_its_bins(foreign, held, in_passes):
    """Bytes that one value more takes, as bench_tables measures them, for 128 columns; and 64 bytes a row."""
    one, two = (
        estimate_vertical(replace(BASE, rows=n, own=128, foreign=(foreign,), bins=256), RATES, 1e6, 7)
        for n in (100_000, 200_000)
    )
    n_values = 100_000 * 128
    assert (two.active_memory - one.active_memory) / n_values == pytest.approx(held + 64 / 128, abs=0.15)
    assert (two.active_passes_memory - one.active_passes_memory) / n_values == pytest.approx(in_passes + 0.5, abs=0.15)
    assert f"active party     {human_bytes(one.active_passes_memory)}" in render_vertical(BASE, RATES, one, 1e6)


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"foreign": ()}, {"foreign": (0,)}, {"key_bits": 1024}, {"depth": 0}])
def test_impossible_workloads_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        VerticalWorkload(**{"rows": 10, "own": 1, "foreign": (1,), **wrong})


def test_elgamal_is_planned_like_paillier(monkeypatch, capsys):
    if available_backends()[0] == "reference":
        pytest.skip("the C extension was not built")
    monkeypatch.setattr(vertical_module, "_REPEATS", 1)
    words = "plan --rows 5000 --features 2 --foreign-features 3 --depth 3 --bins 16 --profile elgamal"
    for more, shown in ((" --json", '"ciphertext_bytes": 320'), ("", "ElGamal on a curve, 40 fraction bits")):
        assert main((words + more).split()) == 0
        assert shown in capsys.readouterr().out
    for words, profile in (("--foreign-features 3", "masks"), ("", "elgamal")):
        assert main(f"plan --rows 50 --features 2 {words} --profile {profile}".split()) == 1
        assert profile in capsys.readouterr().err


def test_text_names_every_party():
    text = render_vertical(BASE, RATES, estimate_vertical(BASE, RATES, 1e6, 0), 1e6)
    assert "active party" in text and "passive party 2" in text and "3 own and 2 + 4 foreign features" in text
    assert "the preset `exact`" in text and "guarded parties" in text and "noised ones" in text


def test_a_sealed_job_says_what_comparing_splits_costs():
    params = {"objective": "binary:logistic", "max_depth": 3, "max_bin": 16}
    sealed = VerticalJob(active="a", data_set="d", label="y", preset="sealed", params=params)
    costs = measure_sealed(planned_sums(sealed), VerticalWorkload(2000, 2, (3,), bins=16, depth=3))
    assert costs.candidates == 7 * 2 * 3 * 16 and 7000 < costs.bytes / costs.candidates < 16000
    assert costs.active_s > 0 < costs.passive_s and "672 candidates" in costs.text()
    wide = replace(sealed, params={**params, "max_bin": 256})
    with pytest.raises(ConfigurationError, match="64 bins"):
        planned_sums(wide)


def test_a_noised_job_says_its_noise_and_what_a_loss_may_repeat():
    fields = {"active": "a", "data_set": "d", "label": "y", "num_rounds": 30, "own_rounds": 20, "params": PARAMS}
    noised = {"preset": "noised", "epsilon": 2.0, "delta": 1e-6}
    waiting = {"on_lost_site": "wait", "noised_repeats": 4}
    plain, waits = (planned_sums(VerticalJob(**fields, **noised, **more)) for more in ({}, waiting))
    text, longer = ("\n".join(noise_lines(plan, (3, 20), 5000)) for plan in (plain, waits))
    assert "10 trees may use its columns, 3 levels each;" in text
    assert "at most 3 of 3 features a tree, 16 bins" in text and "at most 8 of 20 features a tree" in text
    assert "10 trees may use its columns, 3 levels each, 4 may be paid for a second time after a loss" in longer
    ratio = waits.rows_of_noise(20) / plain.rows_of_noise(20)
    assert ratio == pytest.approx(math.sqrt(14 / 10))
    assert noise_figures(waits, (20,))["repeated_trees"] == 4 and planned_sums(VerticalJob(**fields)) is None


def test_command_measures_real_rates(capsys, monkeypatch):
    monkeypatch.setattr(vertical_module, "_REPEATS", 1)
    words = "plan --rows 5000 --features 2 --foreign-features 3 --depth 3 --bins 16 --key-bits 2048 --json"
    assert main(words.split()) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["estimate"]["core_s"] > 0 and document["rates"]["pairs_per_ciphertext"] >= 7


def test_workers_divide_what_can_be_divided_and_say_what_limits_them() -> None:
    estimate = estimate_vertical(BASE, RATES, 1e6, 0)
    one, two, four, five = estimate_workers(BASE, RATES, estimate, 0, 5)
    assert [found.workers for found in (one, two, four, five)] == [1, 2, 4, 5]
    divided = estimate.encrypt_s + estimate.open_s + max(p.core_s for p in estimate.passives)
    partial = BASE.built_nodes * max(map(BASE.slots_of, range(len(BASE.foreign)))) * RATES.ciphertext_bytes
    assert one.s - two.s == pytest.approx(divided / 2 - partial / 2 / INNER_BYTES_PER_S)
    assert two.party_bytes == 512_000 + 1000 * 16  # sums go from worker to worker
    assert one.worker_memory > two.worker_memory > four.worker_memory
    slow_line = replace(estimate, network_s=10 * estimate.wall_s)
    assert estimate_workers(BASE, RATES, slow_line, 0, 1)[0].limited_by == "the line between the parties"
    for most in (0, BASE.rows + 1, 4096):
        with pytest.raises(ConfigurationError, match="--workers must be from 1"):
            estimate_workers(BASE, RATES, estimate, 0, most)
    assert "5  " in render_workers([five]) and five.workers == 5


# -- tunings -----------------------------------------------------------------------------------------------------------


REPOSITORY = Path(__file__).parents[4]


def cli(*arguments: object) -> int:
    return main(["plan", *map(str, arguments)])


def test_a_tuning_is_priced_by_its_trainings(capsys):
    folder = REPOSITORY / "jobs" / "tuning"
    assert cli(folder) == 1 and "--rows and --features" in capsys.readouterr().err
    assert cli(folder, "--rows", 4999, "--features", 23) == 1 and "fewer than 1,000" in capsys.readouterr().err
    assert cli(folder, "--rows", 6000, "--features", 23, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["tuning"] == 8 * 5 * 50 and figures["seconds"] > 0
    # Each of 2,000 rounds at least the histograms of a root and of one child, 23 features of 64 bins.
    assert figures["bytes_sent"] > 2000 * 2 * 23 * 64 * 16
    assert cli(folder, "--rows", 6000, "--features", 23) == 0
    shown = capsys.readouterr().out
    assert "8 trials x 5 folds x 50 rounds = 2,000" in shown and "each at least 1,000 of all sites" in shown
    assert "its rows are held once\n" in shown


def test_a_tuning_by_xgboost_holds_its_rows_once_for_each_fold(capsys, tmp_path):
    recipe = TuningRecipe(
        "t", data_set="d", label="y", params={"max_bin": 16}, trials=[{"max_depth": 2}], num_rounds=2, engine="xgboost"
    )
    assert cli(write_folder(recipe, tmp_path), "--rows", 6000, "--features", 5) == 0
    assert "at a site: its rows are held once for each fold" in capsys.readouterr().out
