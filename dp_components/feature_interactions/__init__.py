"""A1: which features a tree may use. One method of the paper per file."""
