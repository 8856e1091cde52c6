"""What an owner of splits has answered for the rows of one data set: each node once, and each row along one path."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.vertical.model.private_table import NOTHING_ABOVE, PrivateSplit

REFUSED = "a question that this party does not answer"


class AnsweredPaths:
    """Follows rows through a party's own splits.

    Privacy: a row is answered for at a node only if this party's answer at its nearest split above led there. Which
        way the row went at nodes of other parties cannot be checked.
    """

    def __init__(self, n_rows: int):
        self._n_rows = n_rows
        self._answered: set[tuple[int, int]] = set()
        self._reached: dict[int, NDArray[np.int32]] = {}  # by tree: the last answer for each row

    def follow(
        self, tree: int, node: int, split: PrivateSplit, rows: NDArray[np.bool_], goes_left: NDArray[np.bool_]
    ) -> None:
        """Note the answer for a node before it is given.

        Shapes: rows: bool[n_rows]; goes_left: bool[n], one for each of the chosen rows.

        Raises:
            ProtocolError: the node was asked for before, or is not on the path of one of the rows.
        """
        if (tree, node) in self._answered:
            raise ProtocolError(REFUSED)
        self._answered.add((tree, node))
        if split.above is None:  # the party does not know the tree
            return
        reached = self._reached.setdefault(tree, np.full(self._n_rows, _side(*NOTHING_ABOVE), dtype=np.int32))
        if (reached[rows] != _side(*split.above)).any():
            raise ProtocolError(REFUSED)
        reached[rows] = _side(node, goes_left)

    def end_trees(self) -> None:
        """Forget where rows are in the trees so far: only nodes below none of this party's can still be asked for."""
        self._reached.clear()


def _side(node: int, is_left: bool | NDArray[np.bool_]) -> int | NDArray[np.int64]:
    """Number the two sides of every node."""
    return 2 * node + is_left
