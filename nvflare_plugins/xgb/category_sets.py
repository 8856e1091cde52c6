"""Splits by categories in the document of a tree: which categories go right, in the flat form that XGBoost keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CATEGORY_FIELDS = ("categories", "categories_nodes", "categories_segments", "categories_sizes")
_BY_CATEGORY = 1  # XGBoost's split_type


def category_sets(tree: Mapping[str, Any]) -> dict[int, tuple[int, ...]]:
    """Return the categories of each node that is split by them, ascending. Raises: ValueError, TypeError."""
    listed, *places = (tree.get(name, []) for name in CATEGORY_FIELDS)
    sets = {
        int(node): tuple(int(one) for one in listed[start : start + size])
        for node, start, size in zip(*places, strict=True)
    }
    n_nodes = len(tree["left_children"])
    if any(
        not 0 <= node < n_nodes or not places or list(places) != sorted(set(places)) for node, places in sets.items()
    ):
        raise ValueError("sets of categories that are none")
    return sets


def set_categories(tree: dict[str, Any], node: int, categories: tuple[int, ...]) -> None:
    """Make a node one that is split by categories, as XGBoost writes it."""
    sets = {**category_sets(tree), node: categories}
    tree["split_type"][node] = _BY_CATEGORY
    listed: list[int] = []
    places: list[tuple[int, int, int]] = []
    for one in sorted(sets):
        places.append((one, len(listed), len(sets[one])))
        listed += sets[one]
    nodes, starts, sizes = (list(column) for column in zip(*places, strict=True))
    for name, value in zip(CATEGORY_FIELDS, (listed, nodes, starts, sizes), strict=True):
        tree[name] = value
