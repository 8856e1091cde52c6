"""Survival models of several sites equal centralized XGBoost, whatever form the label has."""

from __future__ import annotations

import numpy as np
import pytest

from nvflare_plugins.pooled.job import HorizontalJob
from tests.support import survival
from tests.support.federation import Federation, central_model, leaf_difference, succeed

ROUNDS = 4


@pytest.mark.parametrize(
    ("form", "profile", "params"),
    [
        ("events", "masks", {}),
        ("signed", "plain", {"aft_loss_distribution": "logistic", "aft_loss_distribution_scale": 0.6}),
        ("bounds", "masks", {"aft_loss_distribution": "extreme", "aft_loss_distribution_scale": 1.7}),
        ("bounds", "plain", {"base_score": 20.0, "lambda": 0.1}),
        ("events", "bfv", {}),
        ("events", "ckks", {}),
    ],
)
def test_models_equal_central(tmp_path, form, profile, params):
    frame, label = survival.times(form), survival.FORMS[form]
    # Without being asked for it by name, XGBoost evaluates its metric at scale 1, whatever the job's scale is.
    params = {**survival.AFT, "max_depth": 3, "max_bin": 32, "eval_metric": "aft-nloglik", **params}
    federation = Federation(tmp_path)
    train, evaluated = frame.iloc[:1200], frame.iloc[1200:]
    federation.give_data("train", train)
    federation.give_data("eval", evaluated)
    federation.set_registry_keys()
    job = HorizontalJob("train", label, params, ROUNDS, profile, cuts="exact", eval_data_set="eval")
    succeed(federation.run(job))
    history: dict = {}
    reference = central_model(
        train,
        label,
        params,
        federation.cuts(),
        ROUNDS,
        eval_frame=evaluated,
        evals_result=history,
        verbose_eval=False,
    )
    assert leaf_difference(federation.model(), reference) == 0.0
    for number, row in enumerate(federation.record("site-1").rounds):
        assert row.metrics == pytest.approx(
            {f"eval-{name}": values[number] for name, values in history["eval"].items()}
        )


@pytest.mark.parametrize("n_sites", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_weights_passes_and_any_number_of_sites_make_the_same_trees(tmp_path, n_sites):
    """Rows are read in passes at the first site, and dealt out in an order of their own."""
    frame = survival.times("bounds").assign(w=np.random.default_rng(2).gamma(1.0, size=1_500).astype(np.float32))
    federation, label = Federation(tmp_path, n_sites), survival.FORMS["bounds"]
    federation.give_data("train", frame, np.array_split(np.random.default_rng(n_sites).permutation(1_500), n_sites))
    federation.set_policy("site-1", data_sets={"train": {"path": "train.parquet", "memory": "passes"}})
    federation.set_registry_keys()
    params = {**survival.AFT, "max_depth": 3, "max_bin": 32, "aft_loss_distribution": "extreme", "eval_metric": []}
    succeed(federation.run(HorizontalJob("train", label, params, ROUNDS, cuts="exact", weight="w")))
    reference = central_model(frame, label, params, federation.cuts(), ROUNDS, weight="w")
    assert leaf_difference(federation.model(), reference) <= 2e-7
    again = central_model(frame.assign(w=frame.w * (frame.index != 3)), label, params, federation.cuts(), ROUNDS, "w")
    assert leaf_difference(federation.model(), again) > 2e-7


def test_a_job_without_a_lost_site_is_refused_where_hessians_would_count_its_events(tmp_path):
    federation = Federation(tmp_path, 4, {"consents": {"continue_without_site": True}})
    federation.give_data("train", survival.times("events"))
    job = HorizontalJob("train", survival.FORMS["events"], survival.AFT, 2, on_lost_site="continue")
    outcomes = federation.run(job)
    assert all("'continue' is refused for objective survival:aft" in str(one) for one in outcomes.values()), outcomes
