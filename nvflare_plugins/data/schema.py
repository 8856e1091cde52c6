"""The columns a site would train on, as one canonical document that all sites compare before training.

XGBoost does not compare columns between sites: it would add the histograms of one site's age to another's income.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.data.table import MAX_NAME, Table, is_plain_text

VERSION = 1
MAX_DOCUMENT_BYTES = 16 * 2**20
_TYPES = ("float", "c")
_TYPE_WORDS = {"float": "numbers", "c": "categories"}


@dataclass(frozen=True, slots=True)
class Column:
    """One feature: its name, "float" or "c", and the public category list of a categorical one."""

    name: str
    type: str
    categories: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Schema:
    """Column names, types and category lists in order, label classes, and whether rows are weighted.

    Privacy: column names and public lists; nothing that depends on rows.
    """

    columns: tuple[Column, ...]
    label: str
    label_classes: tuple[str, ...] | None = None
    weight: str | None = None

    @classmethod
    def of(cls, table: Table) -> Schema:
        """Return the schema of this site's table."""
        columns = tuple(
            Column(name, kind, tuple(table.categories.get(name, ())))
            for name, kind in zip(table.feature_names, table.feature_types, strict=True)
        )
        return cls(columns, table.label_name, table.label_classes, table.weight_name)

    def to_bytes(self) -> bytes:
        """Return the canonical document: equal schemas give equal bytes."""
        document = {
            "version": VERSION,
            "columns": [
                {"name": column.name, "type": column.type, "categories": list(column.categories)}
                for column in self.columns
            ],
            "label": self.label,
            "label_classes": None if self.label_classes is None else list(self.label_classes),
            "weight": self.weight,
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @classmethod
    def from_bytes(cls, payload: bytes) -> Schema:
        """Parse a peer's document.

        Raises:
            ProtocolError: not exactly what ``to_bytes`` writes for some schema.
        """
        if len(payload) > MAX_DOCUMENT_BYTES:
            raise ProtocolError("a peer's schema document is too long.")
        try:
            given = json.loads(payload.decode("ascii"))
            columns = tuple(Column(one["name"], one["type"], tuple(one["categories"])) for one in given["columns"])
            classes = given["label_classes"]
            schema = cls(columns, given["label"], None if classes is None else tuple(classes), given["weight"])
            is_canonical = schema.to_bytes() == payload
        except (LookupError, TypeError, ValueError, RecursionError):
            raise ProtocolError("a peer's schema document is not valid.") from None
        # One spelling only: another version, other fields, repeated keys, white space and other escapes are not what a
        # peer of ours writes.
        if not is_canonical:
            raise ProtocolError(f"a peer's schema document is not canonical, or not of version {VERSION}.")
        schema._check()
        return schema

    def _check(self) -> None:
        """Refuse what a peer's document must not hold. Raises: ProtocolError."""
        lists: list[Sequence[str] | None] = [[column.name for column in self.columns], self.label_classes]
        for column in self.columns:
            if column.type not in _TYPES or (column.type == "float" and column.categories):
                raise ProtocolError("a peer's schema document holds an unknown type, or gives numbers a category list.")
            lists.append(None if column.type == "float" else column.categories)
        single = [self.label] if self.weight is None else [self.label, self.weight]
        for texts in (single, *lists):
            if not all(isinstance(text, str) and is_plain_text(text) for text in texts or ()):
                raise ProtocolError(
                    f"a peer's schema document holds a name that is not 1 to {MAX_NAME} printable characters."
                )
            if texts is not None and texts is not single and (not texts or len(set(texts)) != len(texts)):
                raise ProtocolError("a peer's schema document holds a list that is empty or has an entry twice.")


def compare(mine: Schema, theirs: Schema, their_site: str) -> None:
    """Refuse a peer whose schema differs, naming the first difference in column order.

    Raises:
        ConfigurationError: the schemas differ.
    """
    for own, other in zip(mine.columns, theirs.columns, strict=False):
        _compare_column(own, other, mine, theirs, their_site)
    if len(mine.columns) != len(theirs.columns):
        longer, where = (mine, "this site") if len(mine.columns) > len(theirs.columns) else (theirs, their_site)
        extra = longer.columns[min(len(mine.columns), len(theirs.columns))].name
        raise ConfigurationError(
            f"{their_site} has {len(theirs.columns)} columns where this site has {len(mine.columns)}: only {where} "
            f"has column {extra!r}. List the common columns in the job's features."
        )
    if mine.label != theirs.label:
        raise ConfigurationError(f"{their_site} has label {theirs.label!r} where this site has {mine.label!r}.")
    _compare_list(f"label {mine.label!r}", "label class", mine.label_classes, theirs.label_classes, their_site)
    if mine.weight != theirs.weight:
        raise ConfigurationError(
            f"{their_site} has {_weight(theirs)} where this site has {_weight(mine)}: all sites weight rows, or none."
        )


def _compare_column(own: Column, other: Column, mine: Schema, theirs: Schema, their_site: str) -> None:
    if own.name != other.name:
        same_set = {column.name for column in mine.columns} == {column.name for column in theirs.columns}
        remedy = "The order differs: fix it by the job's features." if same_set else "Name the columns alike."
        raise ConfigurationError(f"{their_site} has column {other.name!r} where this site has {own.name!r}. {remedy}")
    if own.type != other.type:
        raise ConfigurationError(
            f"{their_site} reads column {own.name!r} as {_TYPE_WORDS[other.type]}, this site as "
            f"{_TYPE_WORDS[own.type]}: give the job one category list for it, or none."
        )
    _compare_list(f"column {own.name!r}", "category", own.categories, other.categories, their_site)


def _compare_list(
    where: str, what: str, mine: Sequence[str] | None, theirs: Sequence[str] | None, their_site: str
) -> None:
    if mine == theirs:
        return
    own, other = list(mine or ()), list(theirs or ())
    position = next((i for i, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), None)
    if position is None:
        raise ConfigurationError(
            f"{where}: {their_site} has a {what} list of {len(other)} where this site has one of {len(own)}."
        )
    raise ConfigurationError(
        f"{where}: {their_site} has {what} {other[position]!r} at place {position + 1} where this site has "
        f"{own[position]!r}."
    )


def _weight(schema: Schema) -> str:
    return "no row weights" if schema.weight is None else f"weights {schema.weight!r}"
