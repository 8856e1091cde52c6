"""Whatever a job or a policy says, a site and a server answer it with a refusal in words, never with a traceback."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from nvflare.apis.shareable import Shareable

from dp_components.errors import PrivacyError
from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.flare.attempt import SiteReport
from nvflare_plugins.flare.executor import JobTask
from nvflare_plugins.flare.kinds import KINDS
from nvflare_plugins.flare.timeouts import exchange_deadline_s, site_timeout_s
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.xgb.parameters import check_parameters
from tests.conformance.kind_cases import CASES
from tests.support.examples import examples

REFUSALS = (ConfigurationError, ProtocolError)
BASES: dict[type, dict[str, Any]] = {KINDS[name].job: dict(case.least) for name, case in CASES.items()}
RECIPES = {case.recipe: KINDS[name].job for name, case in CASES.items()}


def nested(levels: int, wrap=lambda inner: [inner]) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = wrap(value)
    return value


HOSTILE = [
    10**400,
    -(10**400),
    10**5000,
    2**62,
    2**63,
    -(2**63),
    2**64 + 1,
    1e308,
    -1e308,
    5e-324,
    math.nan,
    math.inf,
    -math.inf,
    True,
    None,
    "",
    " ",
    "\ud800",
    "\x1b[2J\x1b[32m",
    "\u202eyes",
    "x" * 300,
    "y" * 200_000,
    [],
    {},
    [[]],
    [{}],
    [None],
    {"a": []},
    {"": 1},
    {1: 2},
    {None: 1},
    ["a", "a"],
    ["\ud800"],
    [10**400],
    [1, "1"],
    {"a": [0, 10**400]},
    {"a": [math.nan, 1]},
    {"a": ["x", 1]},
    {"a": {"a": {}}},
    {"\x1b[2J": 1},
    b"bytes",
    {1, 2},
    1j,
    object(),
]

TAME = [value for value in HOSTILE if not (isinstance(value, int) and value == 10**5000)]  # what hypothesis can print
HOSTILE += [
    nested(20),
    nested(5000),
    nested(5000, lambda inner: {"a": inner}),
    {"max_depth": nested(5000)},
    {"objective": []},
    {"eval_metric": [[]]},
    {"eval_metric": {"a": 1}},
    {"seed": 10**400},
    {"max_depth": 2**62},
    {"monotone_constraints": "(" * 100_000},
    {"interaction_constraints": "[" * 100_000},
    {"max_bin": 1e308},
    {"eta": "nan"},
    {"base_score": "1" * 5000},
    {"n_trees": 2**62},
    {"depth": [1]},
    {"split_method": []},
]
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers().map(lambda number: 10**300 + number)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(range(len(TAME))).map(lambda number: TAME[number]),  # by number: a warning prints strategies
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(["max_depth", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
relaxed = settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))


def refused_in_words(function, *arguments, **named) -> bool:
    """Tell whether something was refused, in a text that a person can read and a terminal survives."""
    try:
        function(*arguments, **named)
    except (*REFUSALS, PrivacyError) as error:
        text = str(error)
        assert len(text) < 4000 and all(line.isprintable() for line in text.split("\n")), text[:200]
        return True
    return False


def use(job_type: type, document: object) -> None:
    """Read a job and ask it what the shell around every job asks."""
    job = job_type.from_dict(document)
    assert isinstance(job.profile, str) and isinstance(job.tracking, bool)
    assert 0 < exchange_deadline_s(job) < site_timeout_s(job) < math.inf
    json.dumps(job.to_dict(), allow_nan=False)


@pytest.mark.parametrize("job_type", BASES)
def test_every_field_with_every_hostile_value(job_type):
    use(job_type, BASES[job_type])
    for field in dataclasses.fields(job_type):
        for value in HOSTILE:
            refused_in_words(use, job_type, {**BASES[job_type], field.name: value})


@pytest.mark.parametrize("job_type", BASES)
def test_what_is_no_job_at_all(job_type):
    for value in HOSTILE:
        assert refused_in_words(use, job_type, value)
    assert refused_in_words(use, job_type, {**BASES[job_type], "surprise\x1b[2J": 1})


@pytest.mark.parametrize("job_type", BASES)
@relaxed
@given(data=st.data())
def test_any_value_in_any_fields(job_type, data):
    names = st.sampled_from([field.name for field in dataclasses.fields(job_type)]) | st.text(max_size=8)
    changes = data.draw(st.dictionaries(names, values, max_size=3))
    refused_in_words(use, job_type, {**BASES[job_type], **changes})


@pytest.mark.parametrize("job_type", BASES)
def test_a_job_made_in_python_is_refused_in_words_too(job_type):
    for field in dataclasses.fields(job_type):
        for value in HOSTILE:
            refused_in_words(job_type, **{**BASES[job_type], field.name: value})


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_refuse_in_words(recipe):
    base = BASES[RECIPES[recipe]]
    for field in dataclasses.fields(RECIPES[recipe]):
        for value in HOSTILE[::3]:
            refused_in_words(recipe, "name", **{**base, field.name: value})
    for value in [*HOSTILE, "site-1"]:
        if value is not None:
            assert refused_in_words(recipe, "name", **base, sites=value)


PARAMETERS = (
    "objective",
    "max_depth",
    "max_leaves",
    "max_bin",
    "eta",
    "gamma",
    "lambda",
    "alpha",
    "seed",
    "nthread",
    "subsample",
    "colsample_bytree",
    "base_score",
    "eval_metric",
    "num_class",
    "monotone_constraints",
    "interaction_constraints",
    "tree_method",
    "grow_policy",
    "booster",
    "rate_drop",
    "num_parallel_tree",
    "multi_strategy",
    "verbosity",
    "device",
)


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_with_every_hostile_value(name):
    for value in HOSTILE:
        refused_in_words(
            lambda value=value: check_parameters(HorizontalJob("d", "y", params={name: value}).params, ["a"])
        )


@relaxed
@given(params=st.dictionaries(st.sampled_from(PARAMETERS) | st.text(max_size=8), values, max_size=3))
def test_any_value_in_any_parameters(params):
    refused_in_words(
        lambda: check_parameters(HorizontalJob.from_dict({**BASES[HorizontalJob], "params": params}).params, ["a"])
    )


POLICY_KEYS = tuple(field.name for field in dataclasses.fields(SitePolicy) if field.name not in ("site", "workspace"))


@relaxed
@given(policy=st.dictionaries(st.sampled_from(POLICY_KEYS) | st.text(max_size=8), values, max_size=3) | values)
def test_any_policy_is_read_or_refused(policy, tmp_path):
    refused_in_words(SitePolicy.from_dict, policy, workspace=tmp_path, site="site-1")


@pytest.mark.parametrize("key", POLICY_KEYS)
def test_every_key_of_a_policy_with_every_hostile_value(key, tmp_path):
    for value in HOSTILE:
        refused_in_words(SitePolicy.from_dict, {key: value}, workspace=tmp_path, site="site-1")
        refused_in_words(SitePolicy.from_dict, {key: {"a": value}}, workspace=tmp_path, site="site-1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "{",
        "nul",
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"tolerated_colluders":' + "9" * 5000 + "}",
        "\ufeff{}",
        '{"inputs":"a","inputs":"b"}',
        '{"tolerated_colluders":NaN}',
        '{"tolerated_colluders":1e999}',
        '{"inputs":"\\ud800"}',
    ],
)
def test_any_text_of_a_policy_file_is_read_or_refused(tmp_path, text):
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "veilboost.json").write_text(text, encoding="utf-8")
    assert refused_in_words(SitePolicy.load, tmp_path, "site-1")


@relaxed
@given(changes=st.dictionaries(st.sampled_from(["job", "sites", "attempt", "server", "protocols"]), values, max_size=4))
@example({"attempt": "zz" * 16})
@example({"server": "server." + "x" * 100_000})
@example({"server": "server.\x1b[2J"})
@example({"sites": ["\x1b[2J", "site-1"]})
@example({"sites": ["site-1", "x" * 10_000]})
@example({"sites": ["../../site-0", "site-1"]})
@example({"sites": ["site-1", "\u202eetis"]})
def test_any_task_of_the_server_is_read_or_refused(changes):
    data = Shareable()
    good = {"job": BASES[HorizontalJob], "sites": ["site-1", "site-2"], "attempt": "00" * 16, "server": "server.job"}
    data.update({**good, "protocols": [1, 1], **changes})
    refused = refused_in_words(JobTask.from_shareable, data, "site-1", HorizontalJob)
    assert (
        refused
        or changes.get("sites", ["site-1", "site-2"]) == ["site-1", "site-2"]
        or all(name.isascii() and name.isprintable() and len(name) <= 128 for name in changes["sites"])
    )


@relaxed
@given(
    changes=st.dictionaries(
        st.sampled_from(["status", "error", "model_hmac", "summary", "evidence"]), values, max_size=4
    )
)
@example({"summary": "[" * 100_000})
@example({"summary": '{"a":' * 100_000})
@example({"summary": '{"a":' + "9" * 5000 + "}"})
@example({"summary": '"' + "x" * 10_000_000 + '"'})
def test_any_report_of_a_site_is_read_or_refused(changes):
    good = SiteReport("completed", model_hmac="ab" * 32, summary={"rounds": 2}, evidence=b"log").to_dict()
    refused_in_words(SiteReport.from_dict, {**good, **changes})
