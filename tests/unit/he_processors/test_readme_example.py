from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.examples import slow


@pytest.mark.parametrize("n_rows", [50, *slow(1000)])
def test_the_example_of_the_folders_readme_runs_and_is_exact(n_rows: int) -> None:
    text = (Path(__file__).parents[3] / "he_processors" / "README.md").read_text(encoding="utf-8")
    section = text[text.index("## Homomorphic arithmetic as a library") :]
    (code,) = re.findall(r"```python\n(.*?)```", section[: section.index("\n## ", 3)], re.DOTALL)
    names: dict[str, object] = {}
    exec(re.sub(r"\b1000\b", str(n_rows), code), names)  # noqa: S102 - the page's own example
    assert names["upload"].shape[0] == n_rows
    sums, codes, g = names["sums"], names["codes"], names["g"]
    assert np.array_equal(sums.g[:5], [g[codes[0] == code].sum() for code in range(5)])
