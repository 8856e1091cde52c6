"""Vertical jobs and the wheels of the parties: none needs a communicator, and unlike ones agree on an arithmetic."""

from __future__ import annotations

import json
import threading

import pytest
import xgboost as xgb

from nvflare_plugins.growth.arithmetic import arithmetic_here
from nvflare_plugins.kinds.vertical import site as vertical_site
from nvflare_plugins.kinds.vertical.model import ACTIVE_FILE, ActivePart, read_part
from nvflare_plugins.pooled.mediated.mediator import Mediator
from tests.support import vertical_jobs
from tests.support.federation import succeed
from tests.support.vertical_federation import first_difference
from tests.support.vertical_jobs import central, federation, job, merged, run, table

HERE = arithmetic_here()
OTHER = "3.2" if HERE == "3.4" else "3.4"


def centralized() -> bytes:
    return bytes(central(table(390, 6).iloc[:300], 2).save_raw("json"))


def test_no_party_needs_a_communicator(tmp_path, monkeypatch):
    monkeypatch.setattr(xgb, "build_info", lambda: {"USE_FEDERATED": False})
    monkeypatch.setattr(xgb.collective, "init", lambda **args: pytest.fail("a communicator was opened"))
    monkeypatch.setattr(Mediator, "__enter__", lambda self: pytest.fail("XGBoost's messages were waited for"))
    parties = federation(tmp_path)
    succeed(run(parties, job(num_rounds=2, eval_data_set="held")))
    assert first_difference(merged(parties), centralized()) == ""


def test_parties_of_unlike_wheels_grow_trees_in_the_lowest_arithmetic(tmp_path, monkeypatch):
    this, real_run, real_versions = threading.local(), vertical_jobs.run_vertical_site, vertical_site.versions

    def named(job, context, *rest):
        this.site = context.site
        return real_run(job, context, *rest)

    def is_other() -> bool:
        return this.site == "site-2"

    monkeypatch.setattr(vertical_jobs, "run_vertical_site", named)
    monkeypatch.setattr(vertical_site, "arithmetic_here", lambda: OTHER if is_other() else HERE)
    mine = {"xgboost": f"{OTHER}.0"}
    monkeypatch.setattr(vertical_site, "versions", lambda: {**real_versions(), **(mine if is_other() else {})})
    parties = federation(tmp_path)
    succeed(run(parties, job(num_rounds=2)))
    part = read_part(parties.run_folder("site-1") / ACTIVE_FILE, "site-1", ActivePart).part
    lowest = min(HERE, OTHER)
    assert json.loads(part.booster)["version"][:2] == [int(number) for number in lowest.split(".")]
    assert all(f"XGBoost {lowest}" in "\n".join(parties.said[site]) for site in parties.sites)
    if lowest == HERE:
        assert first_difference(merged(parties), centralized()) == ""
