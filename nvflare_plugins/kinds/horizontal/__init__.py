"""Horizontal mode: every site has all features and labels of its own rows."""
