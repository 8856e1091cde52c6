"""A survey of a data set: every finding at once, and a draft of what a job and the policy could say.

Privacy: for the terminal of the data's owner. It shows names of columns, counts, row numbers, words that are known to
mean "missing", and texts that at least ``columns.SHOWN_FROM`` rows share; bounds of numbers are rounded outwards. No
other value of a row is shown.

Columns are looked at one after the other. Those of files that are read in passes are never held together: what is kept
of each are its findings, its frequent texts and its bounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unicodedata import normalize

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nvflare_plugins.base.formatting import near_name
from nvflare_plugins.data.declaration import YES_NO, DataSet, is_yes_or_no
from nvflare_plugins.data.identity import usable_ids
from nvflare_plugins.data.labels import (
    Label,
    columns_of,
    has_event,
    is_labelled,
    survival_bounds,
    words_of_label,
)
from nvflare_plugins.data.table import NOT_IN_NAMES, code_of, is_plain_text
from nvflare_plugins.data.tabular_files import distinct_texts, is_number, is_text, spelt
from nvflare_plugins.data.text_values import NumberFormat
from nvflare_plugins.survey.columns import (
    SHOWN_FROM,
    Column,
    Facts,
    Finding,
    IdShape,
    Sort,
    Use,
    follows,
    found_in,
    look_at,
    number_format,
    rounded_bounds,
    rows_where,
)
from nvflare_plugins.survey.raw_file import ColumnsInPasses, RawFile, UnreadableError, read_raw

_MOST_CLASSES = 20


@dataclass(frozen=True, slots=True)
class Draft:
    """What a job and the policy could say, as the data suggest it.

    Attributes:
        features: without ids, dates, constants and what no job trains on.
        dates: columns of dates, which could be features.
        categories: column -> frequent values. label_classes: likewise; None where labels are numbers.
        feature_bounds: round numbers around the values. Taken from data: not for private jobs.
        options: keys of the policy's data set.
        id_forms: column of ids -> how they are written.
    """

    features: tuple[str, ...] = ()
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    label_classes: tuple[str, ...] | None = None
    feature_bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    dates: tuple[str, ...] = ()
    id_forms: Mapping[str, IdShape] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Survey:
    """All that was found. ``n_rows`` counts those that could be read."""

    n_rows: int
    findings: tuple[Finding, ...]
    draft: Draft
    label: Label | None = None

    @property
    def is_fine(self) -> bool:
        """Whether nothing would stop or mislead a job."""
        return not any(finding.is_problem for finding in self.findings)


Progress = Callable[[int, int], None]


def survey(spec: DataSet, use: Use, progress: Progress = lambda done, of: None) -> Survey:
    """Look at a whole data set.

    Args:
        progress: takes how many columns were looked at, and of how many.

    Raises:
        ConfigurationError: the data set's own loader fails.
    """
    try:
        return _survey(read_raw(spec), use, progress)
    except UnreadableError as error:
        return _survey(error.raw, use, progress)


class _Lazy(dict[str, Any]):
    """Something for each column, made when it is asked for: all are kept, or the last one alone."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Any], *, keeps_all: bool) -> None:
        super().__init__(dict.fromkeys(names))
        self._make = functools.lru_cache(maxsize=None if keeps_all else 1)(make)

    def __getitem__(self, name: str) -> Any:
        return self._make(name) if name in self else super().__getitem__(name)


def _survey(raw: RawFile, use: Use, progress: Progress) -> Survey:
    found = [*raw.findings, *_names(raw)]
    options = _merged({}, found)
    spec = replace(raw.spec, **{**options, "rename": {**raw.spec.rename, **options.get("rename", {})}})
    of_jobs = [options.get("rename", {}).get(name, name) for name in raw.names]
    names = [f"column {i + 1}" for i in range(len(raw.names))] if raw.names_are_data else _told_apart(of_jobs)
    if raw.columns and not raw.n_rows:
        found.append(Finding("no_rows", "there are names of columns, and no rows", not use.may_lack_rows))
    if 0 < spec.max_rows < raw.n_rows:
        found.append(Finding("max_rows", "there are more rows than the policy's max_rows", count=raw.n_rows))
    places = {name: place for place, name in enumerate(names)}
    is_held = not isinstance(raw.columns, ColumnsInPasses)

    by_name = _Lazy(names, lambda name: spelt(raw.columns[places[name]], spec.columns.get(name)), keeps_all=is_held)
    columns = _Lazy(names, lambda name: Column.of(name, by_name[name], spec), keeps_all=is_held)
    chosen = [name for name in columns if _is_asked_for(name, spec, use)]
    may_be_text = [name for name in chosen if not is_number(raw.kind(places[name]))]
    form = _number_format(spec, columns, by_name, may_be_text)
    if form is not None:
        found.append(form)
        spec = replace(spec, **form.options)
        columns = _Lazy(names, lambda name: Column.of(name, by_name[name], spec), keeps_all=is_held)
    look = _Look(spec, use, columns, by_name, raw.names_are_data, frozenset(of_jobs), progress)
    return look.whole(chosen, found, raw.n_rows)


def _number_format(
    spec: DataSet, columns: Mapping[str, Column], raw: Mapping[str, Any], names: Sequence[str]
) -> Finding | None:
    """Find another format of numbers among columns that may be text."""
    others: list[str] = []

    def texts() -> Iterator[Column]:
        for name in names:
            if columns[name].is_text:
                yield columns[name]
            elif is_text(raw[name].type):
                others.append(name)

    def others_follow(form: NumberFormat) -> bool:
        return all(follows(raw[name], form, spec) for name in others)

    return number_format(spec, texts(), others_follow)


def _is_asked_for(name: str, spec: DataSet, use: Use) -> bool:
    special = (*columns_of(use.label), use.weight, use.query)
    return name in special or (name != spec.id and (use.features is None or name in use.features))


def _merged(options: Mapping[str, Any], found: Sequence[Finding]) -> dict[str, Any]:
    """Return options with those of findings: dictionaries and lists grow, everything else is replaced."""
    merged = dict(options)
    for finding in found:
        for key, value in finding.options.items():
            before = merged.get(key)
            if isinstance(value, dict):
                merged[key] = {**(before or {}), **value}
            elif isinstance(value, list):
                merged[key] = list(dict.fromkeys([*(before or ()), *value]))
            else:
                merged[key] = value
    return merged


def _names(raw: RawFile) -> Iterator[Finding]:
    """Yield what is the matter with the columns' names."""
    if raw.names_are_data:
        return
    taken = {*raw.names, *raw.spec.rename.values()}
    unnamed = sum(not name.strip() for name in raw.names)
    if unnamed:
        options = {"rename": {"": "unnamed"}} if raw.names.count("") == unnamed == 1 and "unnamed" not in taken else {}
        words = "columns have no name: jobs with features are not hindered"
        words += ". Policy key: rename" if options else ", but only the file can name these columns"
        yield Finding("no_name", words, not options, count=unnamed, options=options)
    for name in dict.fromkeys(raw.names):
        if raw.names.count(name) > 1 and name.strip():
            words = f"columns share the name {name!r}, which no job reads: name them apart in the file"
            yield Finding("repeated_name", words, column=name, count=raw.names.count(name))
        elif (whole := normalize("NFC", name)) != name and whole not in taken:
            words = (
                f"column name {whole!r} has letters written in two parts, a letter and its mark: other sites' differ"
            )
            taken.add(whole)
            yield Finding("name", f"{words}. Policy key: rename", column=name, options={"rename": {name: whole}})
        elif name.strip() and (not is_plain_text(name) or set(name) & NOT_IN_NAMES):
            tidy = "".join(c if c.isprintable() and c not in NOT_IN_NAMES else "_" for c in name).strip()[:64]
            words = (
                f"column name {name[:40]!r} cannot be that of a feature: it has marks such as [ ] < or invisible ones, "
            )
            words += "or more than 256 characters. "
            words += "Policy key: rename" if name.isprintable() else "Name it otherwise in the file"
            can_be_renamed = tidy and tidy not in taken and name not in raw.spec.rename.values() and name.isprintable()
            options = {"rename": {name: tidy}} if can_be_renamed else {}
            taken.add(tidy)
            yield Finding("name", words, column=name, options=options)


def _told_apart(names: Sequence[str]) -> list[str]:
    """Return the names under which columns are looked at: different ones. No job knows those that get a number."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})" for i, name in enumerate(names)
    ]


def _classes_of_numbers(name: str, values: NDArray[np.float64], found: list[Finding]) -> tuple[str, ...] | None:
    """Return classes to suggest for a label of few whole numbers, which do not count up from 0; None for others."""
    numbers, counts = np.unique(values[np.isfinite(values)], return_counts=True)
    are_few = 2 <= numbers.size <= _MOST_CLASSES and np.array_equal(numbers, np.floor(numbers))
    if not are_few or np.array_equal(numbers, np.arange(numbers.size)):
        return None
    shown = tuple(f"{number:.0f}" for number in numbers[counts >= SHOWN_FROM])
    rare = numbers.size - len(shown)
    words = f"label {name!r} holds {numbers.size} whole numbers that do not count up from 0: if they are classes, give "
    words += "the job label_classes, see the draft" + (
        f", and {rare} more that fewer than {SHOWN_FROM} rows have" * bool(rare)
    )
    found.append(Finding("label_classes", words, is_problem=False, column=name))
    return shown


_OF_FEATURES = ("id", "constant", "no_values", "categories")


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """The columns of one data set, each looked at in its role."""

    spec: DataSet
    use: Use
    columns: Mapping[str, Column]
    raw: Mapping[str, Any]
    names_are_data: bool
    names_of_jobs: frozenset[str]
    progress: Progress

    def whole(self, chosen: Sequence[str], found: list[Finding], n_rows: int) -> Survey:
        """Return everything that was found, with the draft."""
        use, spec = self.use, self.spec
        facts: dict[str, Facts] = {}
        bounds: dict[str, tuple[float, float]] = {}
        if self.columns and not self.names_are_data:
            found += self._absent()
        for place, name in enumerate(chosen if n_rows else ()):
            self.progress(place, len(chosen))
            if name not in (*columns_of(use.label), use.weight, use.query):
                seen = self._feature(name)
                found += seen.findings
                is_varied = seen.sort is Sort.NUMBERS and not seen.is_constant
                if is_varied and seen.values is not None and (pair := rounded_bounds(seen.values)) is not None:
                    bounds[name] = pair
                facts[name] = replace(seen, values=None)  # of all rows, which are not held for all columns at once
        ids = [name for name, one in facts.items() if one.sort is Sort.ID] if not self.names_are_data else []
        named = [str(spec.id)] if spec.id in self.columns and n_rows else []
        forms = self._id_forms([*named, *ids], found)
        classes = self._roles(found) if n_rows else None
        options = _merged({}, found)
        draft = Draft(options=options)
        if not self.names_are_data:
            draft = replace(self._draft(facts, bounds, classes, options), id_forms=forms)
        if (
            set(columns_of(use.label)) & set(self.columns)
            and n_rows
            and use.features is None
            and not (draft.features or self.names_are_data)
        ):
            words = "no column is left to train on: ids, dates, constants and what cannot be read are no features"
            found.append(Finding("no_features", words, is_problem=False))
        return Survey(n_rows, tuple(found), draft, use.label)

    def _id_forms(self, columns: Sequence[str], found: list[Finding]) -> dict[str, IdShape]:
        """Return how the ids of each column are written."""
        forms = {}
        for name in dict.fromkeys(columns):
            if (shape := IdShape.of(usable_ids(self.raw[name], self.spec))) is not None:
                forms[name] = shape
                if name == self.spec.id or shape.is_peculiar:
                    words = f"ids of {name!r} are written {shape}: other parties' have to be alike, or made so. "
                    found.append(Finding("id_form", f"{words}Policy key: id_form", is_problem=False, column=name))
        return forms

    def _roles(self, found: list[Finding]) -> tuple[str, ...] | None:
        """Look at label, weight and ids; return the label's classes."""
        use, classes = self.use, None
        if isinstance(use.label, str) and use.label in self.columns:
            classes, of_label = self._label(use.label)
            found += of_label
        elif use.label is not None and set(columns_of(use.label)) <= set(self.columns):
            found += self._times(cast("Mapping[str, str]", use.label))
        if use.weight in self.columns:
            found += self._weight(str(use.weight))
        if use.query in self.columns:
            found += self._query(str(use.query))
        if self.spec.id in self.columns:
            found += self._ids(str(self.spec.id))
        return classes

    def _absent(self) -> Iterator[Finding]:
        use = self.use
        labels = [("label", name) for name in columns_of(use.label)]
        asked = [*labels, ("weight", use.weight), ("query", use.query), ("id", self.spec.id)]
        for role, name in [*asked, *(("feature", feature) for feature in use.features or ())]:
            if name is not None and name not in self.columns:
                hint = near_name(name, list(self.columns))
                yield Finding("no_such_column", f"there is no column {name!r}, the {role}{hint}", column=name)

    def _feature(self, name: str) -> Facts:
        column, use = self.columns[name], self.use
        if name in use.categories:
            outside = self._outside(column, use.categories[name])
            findings = []
            if outside["count"]:
                words = (
                    f"column {name!r} holds values outside the job's list: complete it, or let unknown ones be missing"
                )
                findings.append(Finding("category", words, not use.unknown_is_missing, name, **outside))
            return Facts(name, Sort.CATEGORIES, tuple(findings))
        facts = look_at(column, self.raw[name], self.spec, is_chosen=use.is_settled)
        if facts.sort is Sort.CATEGORIES and use.is_settled:
            words = f"column {name!r} holds text: give the job a public list of categories, or leave it out of features"
            return replace(facts, findings=(*facts.findings, Finding("no_list", words, column=name)))
        return facts

    def _outside(self, column: Column, public: Sequence[str]) -> dict[str, Any]:
        """Return how many rows hold what is neither missing nor in a public list."""
        position = {text: code for code, text in enumerate(public)}
        missing = {"", *self.spec.missing} - set(public)
        if column.is_text:
            return column.tally(text for text in column.texts if code_of(text, position, missing) == -2)
        if column.numbers is None:
            return rows_where(np.ones(column.n_rows, dtype=bool))
        values, codes = np.unique(column.numbers, return_inverse=True)
        return rows_where(np.array([code_of(value, position, missing) == -2 for value in values.tolist()])[codes])

    def _label(self, name: str) -> tuple[tuple[str, ...] | None, list[Finding]]:
        """Return classes to suggest, if the label is text, and what was found."""
        column, use, found = self.columns[name], self.use, []
        facts = look_at(column, self.raw[name], self.spec, is_chosen=False)
        found += [one for one in facts.findings if one.kind not in _OF_FEATURES]
        classes = use.label_classes
        if classes is not None:
            outside = self._outside(column, classes)
            if outside["count"]:
                words = f"label {name!r} holds values outside label_classes: correct them, or complete the list"
                found.append(Finding("label_class", words, column=name, **outside))
        elif facts.values is None:
            classes = self._suggested_classes(name, facts, found)
        else:
            classes = _classes_of_numbers(name, facts.values, found)
        absent = self._absent_values(column, facts)
        found += self._unlabelled(name, absent)
        if facts.values is not None and use.accepts is not None and use.label_classes is None:
            wrong = ~absent & ~use.accepts(facts.values.astype(np.float32))
            found += found_in(wrong, "label_value", f"label {name!r} must hold {use.label_words}", name)
        if facts.is_constant:
            words = f"label {name!r} has one value only: this site's rows alone teach nothing, and may still take part"
            found.append(Finding("one_class", words, is_problem=False, column=name))
        return classes if use.label_classes is None else None, found

    def _unlabelled(self, name: str, absent: NDArray[np.bool_]) -> Iterator[Finding]:
        if absent.any():
            is_mended = self.spec.drop_unlabelled and self.use.drops_unlabelled
            options = {"drop_unlabelled": True} if self.use.drops_unlabelled and not is_mended else {}
            words = f"label {name!r} lacks values: remove those rows" + (
                ", or have jobs leave them out. Policy key: drop_unlabelled" if self.use.drops_unlabelled else ""
            )
            yield Finding("label_missing", words, not is_mended, name, **rows_where(absent), options=options)

    def _times(self, label: Mapping[str, str]) -> Iterator[Finding]:
        """Look at the columns of a survival label, each by itself and together."""
        values: dict[str, NDArray[np.float64]] = {}
        for name in columns_of(label):
            facts = look_at(self.columns[name], self.raw[name], self.spec, is_chosen=False)
            yield from (one for one in facts.findings if one.kind not in _OF_FEATURES)
            if facts.values is None:
                yield self._no_numbers(name, facts)
            else:
                values[name] = facts.values
        if len(values) < len(label):
            return
        bounds, faults = survival_bounds(label, values)
        for text, is_bad in faults:
            yield Finding("label_value", f"{text}: correct these rows", **rows_where(is_bad))
        is_bad, use = np.any([np.zeros(len(bounds), bool), *(rows for _, rows in faults)], axis=0), self.use
        yield from self._unlabelled(words_of_label(label), ~is_labelled(bounds) & ~is_bad)
        if use.accepts is not None:
            wrong = is_labelled(bounds) & ~is_bad & ~use.accepts(bounds)
            yield from found_in(wrong, "label_value", f"label {words_of_label(label)!r} must hold {use.label_words}")
        if not has_event(bounds).any():
            words = "no row has an event at a known time: this site's rows alone teach little, and " + (
                "the job takes no such site" if use.needs_events else "may still take part"
            )
            yield Finding("no_events", words, use.needs_events)

    def _no_numbers(self, name: str, facts: Facts) -> Finding:
        texts = [text for text in facts.categories if text]
        if texts and all(map(is_yes_or_no, texts)):
            words = f"label {name!r} says yes and no: read them as 1 (it was seen) and 0. Policy key: columns"
            return Finding("label_text", words, column=name, options={"columns": {name: YES_NO}})
        words = (
            f"label {name!r} is no column of numbers: say what each text is, such as 1 for an event and 0 for none. "
        )
        return Finding("label_text", f"{words}Policy key: columns", column=name)

    def _suggested_classes(self, name: str, facts: Facts, found: list[Finding]) -> tuple[str, ...] | None:
        n_classes = len(facts.categories) + facts.n_rare
        if facts.sort is not Sort.CATEGORIES or n_classes > _MOST_CLASSES:
            words = f"label {name!r} is neither numbers nor a few classes: is it the right column?"
            found.append(Finding("label_text", words, column=name))
            return None
        rare = f", and {facts.n_rare} more that fewer than {SHOWN_FROM} rows have" if facts.n_rare else ""
        words = f"label {name!r} is text: give the job label_classes, see the draft{rare}"
        found.append(Finding("label_text", words, self.use.is_settled, name))
        return tuple(sorted(facts.categories))

    def _absent_values(self, column: Column, facts: Facts) -> NDArray[np.bool_]:
        if facts.values is not None:
            return np.isnan(facts.values)
        absent = {"", *self.spec.missing} - set(self.use.label_classes or ())
        return np.array([*(text in absent for text in column.texts), True], dtype=bool)[column.codes]

    def _weight(self, name: str) -> Iterator[Finding]:
        facts = look_at(self.columns[name], self.raw[name], self.spec, is_chosen=False)
        yield from (one for one in facts.findings if one.kind not in ("id", "constant"))
        if facts.values is None:
            yield Finding("weight", f"weight {name!r} is no column of numbers", column=name)
            return
        words = f"weight {name!r} lacks values, or has negative ones"
        yield from found_in(~(facts.values >= 0), "weight", words, name)

    def _query(self, name: str) -> Iterator[Finding]:
        texts, codes = distinct_texts(self.raw[name].cast(pa.string()))
        absent = np.array([*(text.strip() in ("", *self.spec.missing) for text in texts), True], dtype=bool)
        lacking = absent[codes]
        yield from found_in(lacking, "query_missing", f"query {name!r} lacks values", name)
        if lacking.any():
            return
        name = str(self.use.weight)
        if name not in self.columns:
            return
        weight = look_at(self.columns[name], self.raw[name], self.spec, is_chosen=False).values
        if weight is None:
            return
        one_of_each = np.empty(len(texts))
        one_of_each[codes] = weight
        if not np.array_equal(one_of_each[codes], weight, equal_nan=True):
            words = f"weight {name!r} differs within a query: a query has one weight, the same in each row"
            yield Finding("query_weight", words, column=name)

    def _ids(self, name: str) -> Iterator[Finding]:
        ids = usable_ids(self.raw[name], self.spec)
        lacking = np.array([one is None for one in ids], dtype=np.bool_)
        yield from found_in(lacking, "id_missing", f"id {name!r} lacks values, or has invisible characters", name)
        first: dict[str | None, int] = {}
        again = np.array(
            [one is not None and first.setdefault(one, row) != row for row, one in enumerate(ids)], np.bool_
        )
        words = f"id {name!r} names a row again: alignment wants one row for each"
        yield from found_in(again, "id_repeated", words, name)

    def _draft(
        self,
        facts: Mapping[str, Facts],
        bounds: Mapping[str, tuple[float, float]],
        classes: tuple[str, ...] | None,
        options: Mapping[str, Any],
    ) -> Draft:
        good = [
            one
            for one in facts.values()
            if one.sort in (Sort.NUMBERS, Sort.CATEGORIES) and not one.is_constant and self._has_good_name(one)
        ]
        return Draft(
            tuple(one.name for one in good),
            {one.name: one.categories for one in good if one.categories},
            classes,
            {one.name: bounds[one.name] for one in good if one.name in bounds},
            options,
            tuple(one.name for one in facts.values() if one.sort is Sort.DATES and self._has_good_name(one)),
        )

    def _has_good_name(self, facts: Facts) -> bool:
        is_plain = is_plain_text(facts.name) and not set(facts.name) & NOT_IN_NAMES
        is_plain = is_plain and facts.name in self.names_of_jobs
        is_listed = facts.sort is not Sort.CATEGORIES or facts.name in self.use.categories or bool(facts.categories)
        return is_plain and is_listed
