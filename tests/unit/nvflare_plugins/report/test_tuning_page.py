"""The page of a tuning: live until its last trial, and honest about what parameters matter."""

from __future__ import annotations

import math
import random
import re

import pytest

from nvflare_plugins.pages.search_pages import TunedTrial, TuningFacts, tuning_html


def facts_of(scores: list[tuple[dict[str, str | float], float]], n_trials: int | None = None) -> TuningFacts:
    trials = [TunedTrial(n, tuple(p.items()), mean, 0.01, (mean,), 5) for n, (p, mean) in enumerate(scores, start=1)]
    trials.sort(key=lambda one: (math.isnan(one.mean), one.mean))
    return TuningFacts(
        "job", "rows", "y", "rmse", False, 3, 5, tuple(trials), "the script", n_trials or len(trials), "10:00:00"
    )


def importances(html: str) -> dict[str, int]:
    part = html.partition("How much each parameter matters")[2].partition("</section>")[0]
    return {name: int(share) for name, share in re.findall(r"<title>(\w+): (\d+) %</title>", part)}


def test_what_matters_is_told_from_what_does_not_whether_number_or_text() -> None:
    draw = random.Random(0)
    scores = []
    for _ in range(80):
        depth, policy, noise = draw.randint(2, 9), draw.choice(["depthwise", "lossguide", "other"]), draw.random()
        scores.append(
            (
                {"depth": float(depth), "policy": policy, "noise": noise, "fixed": 1.0},
                depth + 3 * (policy == "other") + 0.5 * draw.random(),
            )
        )
    found = importances(tuning_html(facts_of(scores)))
    assert list(found) == ["depth", "policy", "noise"] and found["depth"] > found["policy"] > 15 > found["noise"] + 5
    constant = [(one, 1.0) for one, _ in scores]
    assert set(importances(tuning_html(facts_of(constant))).values()) == {0}


def test_what_chance_gives_is_taken_off() -> None:
    """Of 24 trials in four groups, 3/23 of the variance goes with any parameter by chance."""
    draw = random.Random(1)
    scores = [({f"p{n}": draw.random() for n in range(40)}, draw.random()) for _ in range(24)]
    found = importances(tuning_html(facts_of(scores))).values()
    assert len(found) == 40 and sum(found) / 40 < 9 and min(found) == 0


@pytest.mark.parametrize(
    "scores",
    [
        [({"eta": 0.1}, 0.5)],
        [({"eta": 0.1}, float("nan"))],
        [({"eta": 0.1}, 0.5), ({"eta": 0.2}, 0.5)],
        [({"eta": 0.1}, 0.5), ({}, 0.4), ({"eta": "auto"}, 0.3)],
        [({}, 0.5), ({}, 0.4)],
    ],
)
def test_few_and_odd_trials_have_a_page(scores: list[tuple[dict[str, str | float], float]]) -> None:
    assert "<h2>All trials</h2>" in tuning_html(facts_of(scores))


def test_a_text_parameter_is_drawn_over_its_values() -> None:
    html = tuning_html(facts_of([({"policy": "lossguide"}, 0.5), ({"policy": "depthwise"}, 0.4)]))
    drawn = html.partition("rmse by parameter")[2]
    assert re.findall(r'class="tick">(\w+guide|\w+wise)<', drawn) == ["depthwise", "lossguide"]


def test_a_page_reloads_itself_until_the_last_trial() -> None:
    scores = [({"eta": 0.1}, 0.5), ({"eta": 0.2}, 0.4)]
    running, done = tuning_html(facts_of(scores, 5)), tuning_html(facts_of(scores))
    assert 'http-equiv="refresh"' in running and "running: 2 of 5 trials" in running and "the script" not in running
    assert 'http-equiv="refresh"' not in done and "all 2 trials" in done and "the script" in done
