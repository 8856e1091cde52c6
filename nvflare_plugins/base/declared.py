"""Documents that people write, jobs and policies: fields, ranges, defaults and words are declared once.

A document is a dataclass under ``@document``, and each field has one of the types below, a default if it may be left
out, and its words in a text under it. Pydantic checks a document strictly whenever one is made, whether from a file or
in Python. What is said of a wrong value follows from the declaration, names the field, and never shows the value; so do
the JSON schema and the tables of the documentation.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from enum import Enum, EnumType
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform

from annotated_types import Ge, Gt, Le, Len
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    TypeAdapter,
    ValidationError,
    WrapValidator,
)
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema, core_schema

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.checks import check_plain, plain, shown
from nvflare_plugins.base.formatting import printable

T = TypeVar("T")
_SHOWN = 80
_SAID = "errorMessage"  # as editors call it
_MOST_COMPLAINTS = 5
_LONGEST_S = 1_000_000
_CONFIG = ConfigDict(extra="forbid", use_attribute_docstrings=True)


# -- types of fields --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Words:
    """What a value must be, where the schema alone does not say it well.

    They are all that is said of the value, so that pydantic need not note each of a million wrong entries.
    """

    text: str

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the check, which ends at the first wrong entry."""
        schema = handler(source)
        _end_at_first(schema)
        return schema

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the schema with these words as what editors say of a wrong value."""
        return {**handler(schema), _SAID: f"must be {self.text}"}


class OneOf:
    """One of these values and nothing that is merely equal to it, as 0 is to False."""

    def __init__(self, *values: str | bool | int | type[Enum]) -> None:
        self.values: list[str | bool | int] = []
        for value in values:
            self.values += [one.value for one in value] if isinstance(value, EnumType) else [value]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the check."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return what editors offer."""
        return {"const": self.values[0]} if len(self.values) == 1 else {"enum": self.values}

    def _check(self, value: object) -> object:
        if not any(type(value) is type(one) and value == one for one in self.values):
            raise ValueError
        return value


def _end_at_first(schema: Any) -> None:
    """Have the check of every list and dictionary within end at the first wrong entry."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for part in schema.values():
            _end_at_first(part)
    elif isinstance(schema, list):
        for part in schema:
            _end_at_first(part)


def where(holds: Callable[[Any], object]) -> AfterValidator:
    """Return the check that something holds of a value."""

    def check(value: T) -> T:
        if not holds(value):
            raise ValueError
        return value

    return AfterValidator(check)


STRICT = Strict()
PRINTABLE = where(str.isprintable)
_ASCENDING = where(lambda value: value[0] < value[1])
AS_GIVEN = WrapValidator(lambda value, check: (check(value), value)[1])  # 4 stays 4 where 4.0 would do
Text = Annotated[str, STRICT, Field(min_length=1), PRINTABLE, Words("a non-empty text")]
Name = Annotated[str, STRICT, Field(min_length=1, max_length=256), PRINTABLE, Words("a non-empty text")]
JobId = Annotated[
    str,
    STRICT,
    Field(pattern=r"^[A-Za-z0-9._-]{1,128}$"),
    where(lambda value: value not in (".", "..")),
    Words("the id of a job (letters, digits, '.', '_' and '-')"),
]
Flag = Annotated[bool, STRICT]
FilePath = Annotated[Path, STRICT, Words("a path")]
Whole = Annotated[int, STRICT, Le(1 << 62)]
Rounds = Annotated[int, STRICT, Ge(1), Le(1 << 62)]
Number = Annotated[float, STRICT, Field(allow_inf_nan=False), AS_GIVEN, Words("a finite number")]
Positive = Annotated[float, STRICT, Gt(0), Field(allow_inf_nan=False), AS_GIVEN, Words("a number above 0")]
Seconds = Annotated[
    float, STRICT, Ge(0), Le(_LONGEST_S), AS_GIVEN, Words(f"a number of seconds from 0 to {_LONGEST_S:,}")
]
Names = Annotated[list[Name], Len(1), Words("a list of column names")]
Entry = Annotated[
    Annotated[str, STRICT] | Annotated[int, STRICT, Ge(-(1 << 64)), Le(1 << 64)], Words("a text or a whole number")
]
Entries = Annotated[list[Entry], Len(1), Words("a list of texts or whole numbers")]
TwoEntries = Annotated[list[Entry], Len(2, 2), Words("a list of two texts or whole numbers")]
Bounds = Annotated[list[Number], Len(2, 2), _ASCENDING, Words("two finite numbers, the lower one first")]
BoundsOfColumns = Annotated[
    dict[Name, Bounds], Words("an object that gives each column two finite numbers, the lower one first")
]
EntriesOfColumns = Annotated[
    dict[Name, Entries], Words("an object that gives each column a list of texts or whole numbers")
]
EntriesOfSites = Annotated[
    dict[Name, EntriesOfColumns],
    Words("an object that gives sites an object from column to a list of texts or whole numbers"),
]
Range = Annotated[
    list[Annotated[int, STRICT, Ge(0), Le(1 << 62)]], Len(2, 2), _ASCENDING, Words("two positions, [first, end)")
]
Parameters = Annotated[dict[Name, Any], Words("a dictionary of XGBoost parameters")]


# -- documents --------------------------------------------------------------------------------------------------------


class Document:
    """What every document inherits.

    Attributes:
        WHAT: what complaints call it.
        IS_JSON: whether all that Python may give could stand in a file of JSON, and is refused otherwise.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    WHAT: ClassVar[str]
    IS_JSON: ClassVar[bool] = True


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def document(cls: type[T]) -> type[T]:
    """Make a frozen dataclass whose values are checked when it is made.

    Checks over several fields are its ``__post_init__``.
    """
    made: Any = checked_dataclass(cls, frozen=True, slots=True, config=_CONFIG)
    build = made.__init__
    names = [field.name for field in dataclasses.fields(made)]

    @functools.wraps(build)
    def checked(self: Any, /, *args: Any, **values: Any) -> None:
        """Raise: ConfigurationError, which names what is wrong."""
        if len(args) > len(names) or set(values) & set(names[: len(args)]):
            raise TypeError(f"{made.__name__} takes {', '.join(names)}, each once")
        given = {name: plain(value) for name, value in {**dict(zip(names, args, strict=False)), **values}.items()}
        refuse_unknown(made.WHAT, given, names)
        if made.IS_JSON:
            check_plain(made.WHAT, given)
        try:
            build(self, **given)
        except ValidationError as error:
            raise ConfigurationError(_complaint(made, error)) from None

    made.__init__ = checked
    return made  # type: ignore[no-any-return]


def values_of(of: Any, but: Container[str] = ()) -> dict[str, Any]:
    """Return a dataclass's values by name; what it holds is not copied, so that json's ``default`` may call this."""
    return {name: getattr(of, name) for name in of.__dataclass_fields__ if name not in but}


def schema_of(cls: type[Any]) -> dict[str, Any]:
    """Return a document's JSON schema, for editors; checks over several fields are not in it."""
    return TypeAdapter(cls).json_schema(schema_generator=_Schema)


class _Schema(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@functools.cache
def _cached_schema(cls: Any) -> dict[str, Any]:
    return schema_of(cls)


# -- words ------------------------------------------------------------------------------------------------------------


def words_of(schema: Mapping[str, Any]) -> str:
    """Return what a value of a schema must be, to follow "must be"."""
    if _SAID in schema:
        return str(schema[_SAID]).removeprefix("must be ")
    if "anyOf" in schema:
        parts = [words_of(one) for one in schema["anyOf"] if one != {"type": "null"}]
        left_out = ", or be left out" if {"type": "null"} in schema["anyOf"] else ""
        return " or ".join(dict.fromkeys(parts)) + left_out
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return f"a {'whole ' if kind == 'integer' else ''}number{_range(schema)}"
    if kind == "array":
        return f"a list, each entry {words_of(schema['items'])}"
    if "$ref" in schema:
        return "an object"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"an object from name to {words_of(schema['additionalProperties'])}"
    return {"boolean": "true or false", "string": "a text", "object": "an object"}.get(str(kind), "something else")


def _range(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    most = None if most is not None and most >= 1 << 53 else most
    if "exclusiveMinimum" in schema:
        return f" above {schema['exclusiveMinimum']}" + (f" and at most {most:g}" if most is not None else "")
    if least is not None and most is not None:
        return f" from {least} to {most}"
    return f" of at least {least}" if least is not None else ""


def refuse_unknown(where: str, given: Iterable[object], known: Sequence[str]) -> None:
    """Refuse names that are not known, with the nearest one that is. Raises: ConfigurationError."""
    complaint = _unknown(where, [str(name) for name in given if name not in known], known)
    if complaint:
        raise ConfigurationError(complaint)


def _unknown(where: str, unknown: Sequence[str], known: Iterable[str]) -> str:
    """Return what to say of keys that do not exist, with the nearest that does; "" if there are none."""
    known = list(known)
    texts = []
    for name in sorted(unknown)[:_MOST_COMPLAINTS]:
        near = difflib.get_close_matches(name, known, 1)
        texts.append(printable(name, _SHOWN) + (f" (did you mean {near[0]}?)" if near else ""))
    tail = "" if "did you mean" in "".join(texts) else f"; it knows {', '.join(known)}"
    return f"{where} has unknown fields: {', '.join(texts)}{tail}" if texts else ""


def _complaint(cls: Any, error: ValidationError) -> str:
    """Return all that is wrong, field by field. Nothing of the values is in it but an unknown choice of a job."""
    texts: dict[str, None] = {}
    missing: dict[str, list[str]] = {}
    for one in error.errors(include_url=False, include_context=False):
        is_about_names = one["type"] in ("missing", "unexpected_keyword_argument")
        place, node = _place(cls, one["loc"][:-1] if is_about_names else one["loc"])
        if one["loc"][-1] == "[key]":
            where = _place(cls, one["loc"][:-2])[0]
            texts[f"{where} has a name that is empty, too long or not of allowed characters"] = None
        elif one["type"] == "missing":
            missing.setdefault(place or cls.WHAT, []).append(str(one["loc"][-1]))
        elif one["type"] == "unexpected_keyword_argument":
            texts[_unknown(place, [str(one["loc"][-1])], node["properties"])] = None
        elif "enum" in node and len(one["loc"]) == 1 and isinstance(one["input"], str):
            texts[f"{place}={shown(one['input'])} is unknown; choose one of {', '.join(map(str, node['enum']))}"] = None
        else:
            texts[f"{place} must be {words_of(node)}"] = None
    lacks = [f"{place} lacks {', '.join(names)}" for place, names in missing.items()]
    return "; ".join([*lacks, *texts][:_MOST_COMPLAINTS])


def _place(cls: Any, loc: Sequence[int | str]) -> tuple[str, dict[str, Any]]:
    """Return the name of the deepest place on the way to an error that the schema has words for, and its schema."""
    schema = _cached_schema(cls)
    node, names = schema, []
    for step in loc:
        inner = _inner(node, step)
        if inner is None:
            break
        parts = [one for one in inner.get("anyOf", []) if one != {"type": "null"}]
        inner = parts[0] if len(parts) == 1 and "$ref" in parts[0] else inner
        node = schema["$defs"][inner["$ref"].rpartition("/")[2]] if "$ref" in inner else inner
        names.append(printable(str(step), _SHOWN))
    return ".".join(names), node


def _inner(node: Mapping[str, Any], step: int | str) -> dict[str, Any] | None:
    """Return the schema of a part; None if the whole has words of its own, or is no object."""
    parts = [one for one in node.get("anyOf", []) if one != {"type": "null"}]
    if len(parts) == 1:
        return _inner(parts[0], step)
    if step in node.get("properties", {}):
        found: dict[str, Any] = node["properties"][step]
        return found
    more = next(iter(node.get("patternProperties", {}).values()), node.get("additionalProperties"))
    return more if isinstance(more, dict) and _SAID not in node else None


def description_of(cls: Any, name: str) -> str:
    """Return the words of a field, on one line."""
    return " ".join(inspect.cleandoc(_cached_schema(cls)["properties"][name].get("description", "")).split())
