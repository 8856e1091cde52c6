"""What a test expects of a refusal that depends on rows: a fixed text for others, the reason for the site's log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from he_processors.errors import VeilBoostError
from nvflare_plugins.base.errors import REGISTRY_TEXT, ROWS_TEXT, DataRefusal


@contextmanager
def refused_for(reason: str) -> Iterator[pytest.ExceptionInfo[DataRefusal]]:
    """Expect a ``DataRefusal`` whose reason matches and whose text says nothing of it."""
    with pytest.raises(DataRefusal) as refusal:
        yield refusal
    assert str(refusal.value) in (ROWS_TEXT, REGISTRY_TEXT)
    assert re.search(reason, refusal.value.reason), refusal.value.reason


@contextmanager
def refused(reason: str) -> Iterator[pytest.ExceptionInfo[VeilBoostError]]:
    """Expect an error of ours, public or not, for a reason that matches."""
    with pytest.raises(VeilBoostError) as refusal:
        yield refusal
    assert re.search(reason, getattr(refusal.value, "reason", str(refusal.value)))
