"""Complaints about a document follow from its declaration: they name field, remedy and near names, but no value."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import field
from typing import Annotated, Any

import pytest
from annotated_types import Ge

from he_processors.errors import ConfigurationError
from nvflare_plugins.base import declared
from nvflare_plugins.base.declared import (
    Bounds,
    BoundsOfColumns,
    Document,
    Entries,
    Flag,
    JobId,
    Name,
    OneOf,
    Positive,
    Seconds,
    Whole,
    Words,
    document,
    schema_of,
)


@document
class Budget(Document):
    """A part of a whole."""

    WHAT = "the budget"

    epsilon: Positive
    rows: Annotated[Whole, Ge(1)] = 1


@document
class Example(Document):
    """Everything that a field can be."""

    WHAT = "the example"
    IS_JSON = False  # it holds other documents

    label: Name
    rounds: Annotated[Whole, Ge(1)] = 10
    """How often, of the
    whole.
    """
    choice: Annotated[str, OneOf("quantile", "exact")] = "quantile"
    off: Annotated[bool, OneOf(False), Words("off: nothing pays for it")] = False
    flag: Flag = False
    wait_s: Seconds = 0.0
    bounds: dict[Name, Bounds] = field(default_factory=dict)
    limits: BoundsOfColumns = field(default_factory=dict)
    classes: Entries | None = None
    before: JobId | None = None
    budgets: dict[Name, Budget] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.flag and self.classes is None:
            raise ConfigurationError("flag needs classes")


SECRET = "Miller, born 1961"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"round": 3}, "the example has unknown fields: round (did you mean rounds?)"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1"),
        ({"rounds": 1.0}, "rounds must be a whole number of at least 1"),
        ({"rounds": True}, "rounds must be a whole number of at least 1"),
        ({"rounds": "3"}, "rounds must be a whole number of at least 1"),
        ({"choice": "exakt"}, "choice='exakt' is unknown; choose one of quantile, exact"),
        ({"choice": ["exact"]}, "choice must be one of quantile, exact"),
        ({"off": True}, "off must be off: nothing pays for it"),
        ({"off": 0}, "off must be off: nothing pays for it"),
        ({"flag": 1}, "flag must be true or false"),
        ({"flag": True}, "flag needs classes"),
        ({"wait_s": -1}, "wait_s must be a number of seconds from 0 to 1,000,000"),
        ({"wait_s": True}, "wait_s must be a number of seconds from 0 to 1,000,000"),
        ({"bounds": {"age": [1, SECRET]}}, "bounds.age must be two finite numbers, the lower one first"),
        ({"bounds": {"age": [2, 1]}}, "bounds.age must be two finite numbers, the lower one first"),
        ({"bounds": SECRET}, "bounds must be an object from name to two finite numbers, the lower one first"),
        ({"classes": [SECRET, None]}, "classes must be a list of texts or whole numbers, or be left out"),
        (
            {"before": "../" + SECRET},
            "before must be the id of a job (letters, digits, '.', '_' and '-'), or be left out",
        ),
        ({"before": ".."}, "before must be the id of a job (letters, digits, '.', '_' and '-'), or be left out"),
        ({"budgets": {"a": {"epsilon": 0}}}, "budgets.a.epsilon must be a number above 0"),
        ({"budgets": {"a": {}}}, "budgets.a lacks epsilon"),
        ({"budgets": {"a": {"epsilon": 1, "row": 2}}}, "budgets.a has unknown fields: row (did you mean rows?)"),
        ({"budgets": {"a": SECRET}}, "budgets.a must be an object"),
        (
            {"label": {"a": SECRET}, "rounds": SECRET},
            "label must be a non-empty text; rounds must be a whole number of",
        ),
    ],
)
def test_complaints_name_field_and_remedy_and_show_no_value(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Example(**{"label": "y", **values})
    assert str(caught.value).startswith(said)
    assert "Miller" not in str(caught.value) and caught.value.__cause__ is None


@pytest.mark.parametrize("wrong", [{"classes": [0.5] * 1000}, {"limits": {str(i): [2, 1] for i in range(1000)}}])
def test_a_list_is_read_up_to_its_first_wrong_entry(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # Each noted error takes a kilobyte: a job of some megabytes took gigabytes of every site that refused it.
    monkeypatch.setattr(declared, "_complaint", lambda cls, error: f"noted {error.error_count()}")
    with pytest.raises(ConfigurationError, match=r"^noted [12]$"):  # an entry is neither a text nor a number
        Example("y", **wrong)


def test_all_that_is_lacking_is_named() -> None:
    with pytest.raises(ConfigurationError, match="the example lacks label"):
        Example()  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="the budget lacks epsilon"):
        Budget(rows=3)  # type: ignore[call-arg]


def test_values_stay_as_they_were_given() -> None:
    made = Example("y", 3, wait_s=4, bounds={"age": (0, 1.5)}, budgets={"a": {"epsilon": 1}})  # type: ignore[dict-item]
    told = dataclasses.asdict(made)  # type: ignore[call-overload]
    assert json.dumps(told["wait_s"]) == "4" and told["bounds"] == {"age": [0, 1.5]}
    assert made.budgets["a"] == Budget(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.rounds = 4  # type: ignore[misc]
    with pytest.raises(ConfigurationError, match="rounds must be"):
        dataclasses.replace(made, rounds=0)  # type: ignore[type-var]


def test_an_argument_twice_is_a_mistake_of_the_program() -> None:
    with pytest.raises(TypeError, match="each once"):
        Example("y", label="z")  # type: ignore[misc]


def test_the_schema_says_what_editors_show() -> None:
    fields = schema_of(Example)["properties"]
    assert fields["rounds"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 1 << 62,
        "default": 10,
        "description": "How often, of the\nwhole.",
    }
    assert fields["choice"]["enum"] == ["quantile", "exact"] and schema_of(Example)["additionalProperties"] is False
