"""Vertical training: the party with the label grows the trees, light workers answer at those with more columns."""
