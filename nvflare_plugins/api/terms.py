"""What the tables of all sites have in common, and what of them no reader makes equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.formatting import near_name
from nvflare_plugins.cli.check import sentence
from nvflare_plugins.cli.demo import task_of
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.survey.columns import Column, Finding, Use, look_at
from nvflare_plugins.survey.raw_file import RawFile, read_raw
from nvflare_plugins.survey.survey import Survey, survey

_SAYS_NOTHING = ("constant", "no_values")


@dataclass(frozen=True, slots=True)
class SiteTable:
    """One site's table as it stands. Attributes: names: of its columns, as jobs know them."""

    spec: DataSet
    raw: RawFile
    found: Survey

    @classmethod
    def of(cls, spec: DataSet, label: str) -> SiteTable:
        """Look at a site's whole table."""
        raw = read_raw(spec)
        return cls(spec, raw, survey(spec, Use(label=label if label in raw.names else None)))

    @property
    def names(self) -> tuple[str, ...]:
        return self.raw.names

    @property
    def says_nothing(self) -> set[str]:
        """Columns of one value or none, which may say something at other sites."""
        return {str(one.column) for one in self.found.findings if one.kind in _SAYS_NOTHING}

    @property
    def problems(self) -> list[str]:
        """What stops a job or misleads it, each with how ``vb.read`` says it where it can."""
        return [hinted(one) for one in self.found.findings if one.is_problem]

    def values(self, name: str) -> list[Any]:
        """Return the different values of a column that a label may have: texts, or numbers; missing ones left out."""
        raw = self.raw.columns[self.names.index(name)]
        facts = look_at(Column.of(name, raw, self.raw.spec), raw, self.raw.spec, is_chosen=True)
        if facts.values is None:
            return Column.of(name, raw, self.raw.spec).present(self.raw.spec.missing)
        found = np.unique(facts.values[np.isfinite(facts.values)]).tolist()
        return [int(value) if float(value).is_integer() else value for value in found]


def hinted(finding: Finding) -> str:
    """Return a finding in words, with what ``vb.read`` takes to read the file otherwise."""
    arguments = ", ".join(f"{key}={value!r}" for key, value in finding.options.items())
    return sentence(finding) + (f". In Python: vb.read(path, {arguments})" if arguments else "")


@dataclass(frozen=True, slots=True)
class Terms:
    """What a job can say of all tables together.

    Attributes:
        features: columns that every site has and can use.
        categories: column -> its public list, of values that at least ten rows of a site have.
        left_out: columns that some site can read as no feature: ids, dates, free text.
        problems: site -> what no reader makes equal, with the remedy.
    """

    features: tuple[str, ...]
    categories: Mapping[str, list[str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    problems: Mapping[str, list[str]] = field(default_factory=dict)


def common_terms(tables: Mapping[str, SiteTable], special: Sequence[str], wanted: Sequence[str] | None) -> Terms:
    """Unite the sites' drafts.

    Args:
        special: columns that are no features: label, weight, id.
        wanted: features that the caller names; None takes all that some site drafts.
    """
    drafted = dict.fromkeys(name for table in tables.values() for name in table.found.draft.features)
    names = [name for name in (drafted if wanted is None else wanted) if name not in special]
    problems: dict[str, list[str]] = {site: [] for site in tables}
    features, left_out, categories = [], [], {}
    for name in names:
        lacking = [site for site, table in tables.items() if table.names and name not in table.names]
        for site in lacking:
            problems[site].append(_lacks(name, tables, site))
        if lacking:
            continue
        if wanted is None and any(not _can_use(table, name) for table in tables.values()):
            left_out.append(name)
            continue
        features.append(name)
        lists = {site: table.found.draft.categories.get(name) for site, table in tables.items()}
        if any(lists.values()):
            for site in _numeric_among(name, tables, lists):
                others = ", ".join(one for one, words in lists.items() if words)
                problems[site].append(
                    f"column {name!r} holds numbers here and texts at {others}. Remedy: vb.read(path, columns="
                    f"{{{name!r}: 'categories'}}) here, or give the texts there their numbers"
                )
            categories[name] = sorted({text for words in lists.values() for text in words or ()})
    return Terms(tuple(features), categories, tuple(left_out), {site: some for site, some in problems.items() if some})


def _lacks(name: str, tables: Mapping[str, SiteTable], site: str) -> str:
    owners = ", ".join(one for one, table in tables.items() if name in table.names)
    hint = near_name(name, list(tables[site].names))
    return (
        f"there is no column {name!r}, which {owners or 'features'} has{hint or '.'} Remedy: "
        f"vb.read(path, rename={{'NAME HERE': {name!r}}}), or name the common columns in features=[...]"
    )


def _can_use(table: SiteTable, name: str) -> bool:
    return name in table.found.draft.features or name in table.says_nothing


def _numeric_among(name: str, tables: Mapping[str, SiteTable], lists: Mapping[str, object]) -> Iterator[str]:
    for site, table in tables.items():
        if not lists[site] and name in table.found.draft.features:
            yield site


def task(tables: Mapping[str, SiteTable], label: str) -> tuple[dict[str, Any], list[str | int] | None, str]:
    """Choose an objective by the label.

    Returns:
        XGBoost parameters, the label's classes (None where they are 0, 1, ... or numbers), and a metric.

    Raises:
        ConfigurationError: a label of text here and of numbers there, of one value, or of too many texts.
    """
    values = {site: table.values(label) for site, table in tables.items()}
    texts = [site for site, some in values.items() if any(isinstance(value, str) for value in some)]
    numbers = [site for site, some in values.items() if some and site not in texts]
    if texts and numbers:
        raise ConfigurationError(
            f"label {label!r} is text at {', '.join(texts)} and numbers at {', '.join(numbers)}. Remedy: "
            f"vb.read(path, columns={{{label!r}: {{'TEXT': 0, ...}}}}) where it is text"
        )
    found = task_of(pd.Series(list(dict.fromkeys(value for some in values.values() for value in some))))
    return found.params, found.label_classes, found.federated_metric
