"""Survival models of several sites equal centralized XGBoost, whatever form the label has."""

from __future__ import annotations

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
