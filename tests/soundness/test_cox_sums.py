"""What sums over rows at risk tell of a bin of times: exactly how many of its rows each leaf has, single ones too.

Every site knows the trees and, before and after a tree, the sum of exp(margin) over the rows of a bin. Rows whose
margins are alike before move by the leaves' values, so that the sum afterwards is one of a few million numbers. The
attack tries them all. A second tree tells which leaves of both belong to one row, and so on: paths of single rows. It
works, as SECURITY says; what it does not find is whose rows they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.growth import survival as cox
from nvflare_plugins.growth.training import Training
from nvflare_plugins.kinds.horizontal import site as horizontal_site
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.wire.envelope import Kind
from tests.support import survival
from tests.support.federation import Federation, succeed


def counts(n_rows: int, n_leaves: int) -> Iterator[np.ndarray]:
    """Yield all ways in which rows may share leaves."""
    for chosen in combinations_with_replacement(range(n_leaves), n_rows):
        yield np.bincount(chosen, minlength=n_leaves)


def recovered(n_rows: int, before: float, after: float, leaves: np.ndarray, digits: float) -> list[np.ndarray]:
    """Return the ways that fit a bin's sums before and after a first tree."""
    share = before / n_rows
    return [way for way in counts(n_rows, leaves.size) if abs(share * way @ np.exp(leaves) - after) < digits * after]


@pytest.mark.parametrize(("digits", "is_found"), [(1e-6, True), (0.05, False)])
def test_leaves_of_a_bins_rows_are_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: float, is_found: bool
) -> None:
    edges, opened = [], []
    search, hazards = horizontal_site.search_times, Training._hazards
    monkeypatch.setattr(horizontal_site, "search_times", lambda *a: edges.append(search(*a)) or edges[-1])

    def seen(self: Training, known: cox.RiskRange) -> cox.Hazards:
        real = self._sums.rows

        def rows(kind: Kind, values: np.ndarray) -> np.ndarray:
            found = real(kind, values)
            opened.append(cox.from_words(found, self._plan.n_rows))
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._sums, "rows", rows)
            return hazards(self, known)

    monkeypatch.setattr(Training, "_hazards", seen)
    frame, federation = survival.times("events", 300, 4), Federation(tmp_path)
    federation.give_data("train", frame)
    params = {"objective": "survival:cox", "max_depth": 2, "max_bin": 16}
    succeed(federation.run(HorizontalJob("train", survival.FORMS["events"], params, 3)))

    booster = xgb.Booster(model_file=bytearray(federation.model()))
    trees = booster.trees_to_dataframe()
    leaves = [trees[(trees.Tree == n) & (trees.Feature == "Leaf")] for n in range(2)]
    values = [one.Gain.to_numpy() for one in leaves]
    grid = edges[0]
    places = np.searchsorted(grid, frame.days.to_numpy(np.float32), side="right")
    rows = np.bincount(places, minlength=grid.size + 1)
    first, second, third = (next(one for one in opened if np.isclose(one.sum(), total)) for total in sums_of(opened))
    assert first == pytest.approx(rows)  # at first hazards are 1: the sums are counts
    smallest = int(np.argmin(rows))
    found = recovered(int(rows[smallest]), first[smallest], second[smallest], values[0], digits)
    matrix = xgb.DMatrix(
        frame[booster.feature_names].to_numpy()[places == smallest], feature_names=booster.feature_names
    )
    ends = booster.predict(matrix, pred_leaf=True)[:, :2].astype(int).T
    paths = [np.searchsorted(one.Node.to_numpy(), end) for one, end in zip(leaves, ends, strict=True)]
    true = np.bincount(paths[0], minlength=values[0].size)
    assert any((way == true).all() for way in found)
    assert (len(found) == 1) is is_found
    if not is_found:
        return
    # The next tree, given the first one's counts: which leaves of both trees the same row has.
    pairs = linked(true, third[smallest], *values)
    together = np.zeros((values[0].size, values[1].size), int)
    np.add.at(together, tuple(paths), 1)
    assert len(pairs) == 1 and (pairs[0] == together).all()


def linked(of_first: np.ndarray, after: float, first: np.ndarray, second: np.ndarray) -> list[np.ndarray]:
    """Return the tables of leaves of a first and a second tree that fit a bin's sum after both, to its last digits."""
    ways = [list(counts(int(n), second.size)) for n in of_first]
    margins = first.astype(np.float32)[:, None] + second.astype(np.float32)
    risks = [np.array(way) @ cox.exp(row) for row, way in zip(margins, ways, strict=True)]
    places = np.argwhere(np.abs(reduce(np.add.outer, risks) - after) < 1e-12 * after)
    return [np.stack([way[n] for way, n in zip(ways, place, strict=True)]) for place in places]


def sums_of(opened: list[np.ndarray]) -> list[float]:
    """Return the totals of the first three rounds; all sites have opened each."""
    totals = list(dict.fromkeys(float(one.sum()) for one in opened))
    assert len(totals) == 3
    return totals
