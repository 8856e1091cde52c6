"""The rows of a finished run, read anew from a site's data sets as the run's record says that they were read then."""

from __future__ import annotations

from he_processors.errors import ConfigurationError
from nvflare_plugins.data_sets.declaration import DataSet
from nvflare_plugins.data_sets.table import Table, load_table
from nvflare_plugins.failures import DataRefusal
from nvflare_plugins.report.data_facts import DataFacts
from nvflare_plugins.report.run_record import RunRecord
from nvflare_plugins.site.policy.values import is_private


def load_again(spec: DataSet, facts: DataFacts, record: RunRecord, takes_passes: bool = False) -> Table:
    """Return the rows of a data set with a run's columns, lists and label.

    Args:
        takes_passes: the caller does without ``Table.features`` where the policy wants no data set held.

    Raises:
        ConfigurationError: they do not fit any more; the reason is this site's own, and nobody else reads it.
    """
    try:
        return load_table(
            spec,
            label=facts.label,
            weight=facts.weight or None,
            features=facts.columns,
            categories=facts.categories,
            label_classes=facts.label_classes or None,
            unknown_is_missing=bool(record.settings.get("unknown_category_is_missing")),
            may_lack_rows=True,
            repair=is_private(record.profile),
            takes_passes=takes_passes,
            held_by="whoever attacks a model at the site holds all rows at once",
        )
    except DataRefusal as error:
        raise ConfigurationError(error.reason) from None
