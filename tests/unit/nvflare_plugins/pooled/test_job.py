"""A job says what it says: unknown fields, unknown choices and impossible combinations are refused."""

from __future__ import annotations

import dataclasses

import pytest

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.attempt.session import Terms, compare_documents, compare_versions
from nvflare_plugins.data.schema import Column, Schema
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.site.policy_values import Floors
from nvflare_plugins.xgb.rounds import parse_metrics

JOB = HorizontalJob("train", "label", {"objective": "binary:logistic"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"profile": "none"}, "profile='none' is unknown"),
        ({"cuts": "sketch"}, "cuts='sketch' is unknown"),
        ({"cuts": "uniform"}, "needs cut_bounds"),
        ({"num_rounds": 0}, "num_rounds must be"),
        ({"num_rounds": True}, "num_rounds must be"),
        ({"min_rows_per_cut": 1}, "min_rows_per_cut"),
        ({"early_stopping_rounds": 3}, "needs an eval_data_set"),
        ({"data_set": ""}, "data_set must be"),
        ({"params": ["a"]}, "params must be"),
        ({"eval_data_set": ""}, "eval_data_set must be"),
        ({"weight": 3}, "weight must be"),
        ({"features": "age"}, "features must be"),
        ({"features": []}, "features must be"),
        ({"label_classes": [None]}, "label_classes must be"),
        ({"categories": {"a": "bc"}}, "categories must"),
        ({"categories": ["a"]}, "categories must"),
        ({"cut_bounds": {"a": [1, 0]}}, "cut_bounds must"),
        ({"cut_bounds": {"a": [0, float("inf")]}}, "cut_bounds.a must"),
        ({"tracking": "no"}, "tracking must be"),
        ({"finest_exponent": 1.5}, "finest_exponent must be"),
        ({"deadline_s": -1}, "deadline_s must be"),
        ({"word_bits": 16}, "word_bits must be one of 64, 32"),
        ({"word_bits": 32.0}, "word_bits must be one of 64, 32"),
        ({"word_bits": 32, "engine": "xgboost"}, "word_bits=32 is for trees that the sites grow: set engine='own', or"),
        ({"word_bits": 32, "profile": "bfv"}, "profiles plain and masks, not bfv, .* or set word_bits to 64"),
        ({"word_bits": 32, "profile": "plugin.x"}, "profiles plain and masks, not plugin.x"),
        ({"word_bits": 32, "weight": "w"}, "refused with weight"),
        ({"params": {"max_bin": 2}}, "max_bin=2 leaves no cut point"),
        ({"params": {"multi_strategy": "multi_output_tree"}, "categories": {"a": ["b"]}}, "takes no categories"),
    ],
)
def test_what_a_job_may_not_say(changes, words):
    with pytest.raises(ConfigurationError, match=words):
        HorizontalJob.from_dict({**JOB.to_dict(), **changes})


def terms() -> Terms:
    schema = Schema((Column("age", "float"),), "label")
    floors = Floors(effective_rows=100, rows_per_node=4, sites=3)
    return Terms({"xgboost": "3.2.0"}, JOB.to_dict(), {"agreed": {"eta": 0.3}}, schema, {}, {"10": "ab"}, floors)


def test_terms_survive_the_wire_and_hostile_bytes_do_not():
    data = terms().to_bytes()
    assert Terms.from_bytes(data) == terms()
    endless = dataclasses.replace(terms(), floors=Floors(10**400, 4, 3)).to_bytes()
    nodes, other = b'"rows_per_node": 4', [b'"rows_per_node":-4', b'"rows_per_node":""', b'"rows_per_tree": 4']
    hostile_floors = [data.replace(nodes, changed) for changed in other]
    for broken in (b"", data[:-1], data + b"x", data.replace(b'{"10"', b'["10"'), *hostile_floors, endless):
        with pytest.raises(ProtocolError):
            Terms.from_bytes(broken)


def test_differences_are_named():
    with pytest.raises(ConfigurationError, match=r"site-2 runs xgboost 3.2.1 where this site runs 3.2.0"):
        compare_versions({"xgboost": "3.2.0", "veilboost": "1"}, {"xgboost": "3.2.1", "veilboost": "1"}, "site-2")
    with pytest.raises(ConfigurationError, match="site-2 has another value of 'eta' in the parameters"):
        compare_documents("the parameters", {"eta": 0.3}, {"eta": 0.4}, "site-2")


@pytest.mark.parametrize("version", ["3.2.1\nERROR site-3 lies\x1b[2J", "9" * 5000, ["3.2\x1b"] * 99, None])
def test_a_peers_version_cannot_steer_a_log_or_fill_it(version):
    with pytest.raises(ConfigurationError) as caught:
        compare_versions({"xgboost": "3.2.0", "veilboost": "1"}, {"xgboost": version, "veilboost": "1"}, "site-2")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 200


def test_the_last_checkpoints_stay_and_a_finished_run_needs_none(tmp_path):
    folder = RunFolder(tmp_path, "job-1").create()
    for n_rounds in (10, 20, 30, 40):
        folder.write_checkpoint(n_rounds, b"{}")
    assert sorted(folder.checkpoints()) == [20, 30, 40]
    folder.write_model(b"{}")
    assert sorted(folder.checkpoints()) == [20, 30, 40], "other sites may have no model yet"
    folder.drop_checkpoints()
    assert folder.checkpoints() == {}


@pytest.mark.parametrize("job_id", ["..", ".", "a/b", "", "x" * 200, "a b"])
def test_a_job_id_cannot_leave_the_folder_of_runs(tmp_path, job_id):
    with pytest.raises(ConfigurationError):
        RunFolder(tmp_path, job_id)


def test_metrics_are_read_from_xgboosts_line():
    line = "[3]\ttrain-auc:0.98700\teval-error@0.3:0.01\teval-mlogloss:1e-05"
    assert parse_metrics(line) == {"train-auc": 0.987, "eval-error@0.3": 0.01, "eval-mlogloss": 1e-05}
