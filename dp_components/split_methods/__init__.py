"""C1: how trees come to their splits. One method of the paper per file."""
