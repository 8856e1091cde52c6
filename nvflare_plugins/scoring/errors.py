"""The error of scoring."""

from __future__ import annotations

from he_processors.errors import ConfigurationError


class ScoringError(ConfigurationError, ValueError):
    """A model or a table cannot be scored with; the message names file, column, count and remedy, never a value.

    Also a ``ValueError``, which scikit-learn expects of an estimator that is given a table it cannot use.
    """
