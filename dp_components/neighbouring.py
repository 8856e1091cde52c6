"""The neighbouring relation: which two data sets no one shall be able to tell apart.

A guarantee without it means nothing, and the factor between two relations is the commonest error in private learning;
so it is a type that every sensitivity, event and ledger carries, and two different ones are never added up.
"""

from __future__ import annotations

from enum import Enum


class NeighbouringRelation(Enum):
    """What may differ between neighbouring data sets. Protected is a record, never a whole site.

    Attributes:
        ADD_OR_REMOVE_ROW: one row is there or not: the relation of Maddock et al. and the default.
        REPLACE_ROW: one row has other features and another label; twice the sensitivity of a sum.
        CHANGE_LABEL: one row has another label; its features, and so the nodes it falls into, are public.
        CHANGE_VALUE: one feature value of one row differs (FederBoost's element level).
    """

    ADD_OR_REMOVE_ROW = "add_or_remove_row"
    REPLACE_ROW = "replace_row"
    CHANGE_LABEL = "change_label"
    CHANGE_VALUE = "change_value"
