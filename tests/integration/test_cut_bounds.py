"""Bins that a job chooses: the same bounds again release nothing new, other bounds need the site's consent."""

from __future__ import annotations

from he_processors.errors import ConfigurationError
from nvflare_plugins.pooled.job import HorizontalJob
from tests.oracle.test_horizontal_equals_central import breast
from tests.support.federation import Federation, succeed


def test_other_bounds_for_the_same_rows_are_a_second_search(tmp_path):
    frame = breast()
    federation = Federation.of(tmp_path, policy={"consents": {}}, train=frame)
    bounds = {name: [float(frame[name].min()), float(frame[name].max())] for name in frame.columns.drop("label")}

    def run(job_id: str, **changed: list[float]):
        job = HorizontalJob(
            "train",
            "label",
            {"objective": "binary:logistic", "max_bin": 16},
            2,
            cuts="uniform",
            cut_bounds={**bounds, **changed},
        )
        return federation.run(job, job_id)

    succeed(run("first"))
    succeed(run("again"))
    narrowed = run("narrowed", **{"mean radius": [12.0, 12.5]})
    assert all(isinstance(outcome, ConfigurationError) for outcome in narrowed.values())
    assert "second_quantile_search" in str(narrowed["site-1"])
