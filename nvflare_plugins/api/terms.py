"""What the tables of all sites have in common, and what of them no reader makes equal."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from nvflare_plugins.base.formatting import near_name
from nvflare_plugins.cli.check import sentence
from nvflare_plugins.cli.demo import task_of
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.labels import Label, columns_of
from nvflare_plugins.survey.agreement import SiteDraft
from nvflare_plugins.survey.columns import Column, Finding, IdShape, Use, look_at
from nvflare_plugins.survey.raw_file import RawFile, read_raw
from nvflare_plugins.survey.survey import Survey, survey

_LEFT_OUT = ("dates",)  # columns of no feature, which stop nothing; a job that names one is refused by its check
_SAYS_NOTHING = ("constant", "no_values")


@dataclass(frozen=True, slots=True)
class SiteTable:
    """One site's table as it stands. Attributes: names: of its columns, as jobs know them."""

    raw: RawFile
    found: Survey
    options: Mapping[str, Any]

    @classmethod
    def of(cls, spec: DataSet, label: Label, options: Mapping[str, Any]) -> SiteTable:
        """Look at a site's whole table. Args: options: keys of the policy's data set that say how it is read."""
        raw = read_raw(spec)
        has_label = set(columns_of(label)) <= set(raw.names)
        return cls(raw, survey(spec, Use(label=label if has_label else None)), options)

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
        return [hinted(one) for one in self.found.findings if stops(one)]

    def values(self, name: str) -> list[Any]:
        """Return the different values of a column that a label may have: texts, or numbers; missing ones left out."""
        raw = self.raw.columns[self.names.index(name)]
        facts = look_at(Column.of(name, raw, self.raw.spec), raw, self.raw.spec, is_chosen=True)
        if facts.values is None:
            return Column.of(name, raw, self.raw.spec).present(self.raw.spec.missing)
        found = np.unique(facts.values[np.isfinite(facts.values)]).tolist()
        return [int(value) if float(value).is_integer() else value for value in found]


def stops(finding: Finding) -> bool:
    """Return whether a finding stops a training whose features follow from the tables."""
    return finding.is_problem and finding.kind not in _LEFT_OUT


def hinted(finding: Finding) -> str:
    """Return a finding in words, with what ``vb.read`` takes to read the file otherwise."""
    arguments = ", ".join(f"{key}={value!r}" for key, value in finding.options.items())
    return sentence(finding) + (f". In Python: vb.read(path, {arguments})" if arguments else "")


def drafts_of(
    tables: Mapping[str, SiteTable], label: Label, special: Sequence[str], wanted: Sequence[str] | None
) -> dict[str, SiteDraft]:
    """Return what every site's table suggests, to be united (``survey.agreement``).

    Args:
        special: columns that are no features.
        wanted: the features, where the caller names them; dates among them are numbers then.
    """
    drafted = {name for table in tables.values() for name in table.found.draft.features}
    with_texts = {name for table in tables.values() for name in table.found.draft.categories}

    def of(table: SiteTable) -> SiteDraft:
        draft = table.found.draft
        silent = [name for name in table.names if name in table.says_nothing & drafted]
        known = dict.fromkeys([*draft.features, *silent, *(() if wanted is None else draft.dates)])
        names = [name for name in known if name not in special and (wanted is None or name in wanted)]
        texts = {name: list(draft.categories.get(name, ())) for name in names if name in with_texts}
        texts = {name: some for name, some in texts.items() if some or name in silent}
        numbers: dict[str, tuple[float, float] | None] = dict.fromkeys(name for name in names if name not in texts)
        classes = None if draft.label_classes is None else list(draft.label_classes)
        options = {key: copy.deepcopy(value) for key, value in table.options.items()}
        return SiteDraft(label, [*names, *columns_of(label)], numbers, texts, [], {}, classes, options)

    return {site: of(table) for site, table in tables.items()}


def id_drafts(tables: Mapping[str, SiteTable], name: str) -> dict[str, SiteDraft]:
    """Return how every site writes its ids, to be united."""
    shapes = {site: table.found.draft.id_forms.get(name) for site, table in tables.items()}

    def of(site: str, shape: IdShape) -> SiteDraft:
        return SiteDraft(None, [name], {}, {}, [], {name: asdict(shape)}, None, copy.deepcopy({**tables[site].options}))

    return {site: of(site, shape) for site, shape in shapes.items() if shape is not None}


def lacking(tables: Mapping[str, SiteTable], features: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (site, what to do) for each feature that a site has no column for."""
    for name in features:
        owners = ", ".join(site for site, table in tables.items() if name in table.names)
        for site, table in tables.items():
            if table.names and name not in table.names:
                hint = near_name(name, list(table.names))
                yield (
                    site,
                    f"there is no column {name!r}, which {owners or 'features'} has{hint or '.'} Remedy: "
                    f"vb.read(path, rename={{'NAME HERE': {name!r}}}), or name the common columns in features=[...]",
                )


def task(tables: Mapping[str, SiteTable], label: Label) -> tuple[dict[str, Any], list[str | int] | None, str]:
    """Choose an objective by the label.

    Returns:
        XGBoost parameters, the label's classes (None where they are 0, 1, ... or numbers), and a metric.

    Raises:
        ConfigurationError: a label of one value, or of too many texts.
    """
    if not isinstance(label, str):
        return {"objective": "survival:aft"}, None, "aft-nloglik"
    found = task_of(pd.Series(list(dict.fromkeys(one for table in tables.values() for one in table.values(label)))))
    return found.params, found.label_classes, found.federated_metric
