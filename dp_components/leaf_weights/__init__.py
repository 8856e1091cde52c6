"""C2: what a leaf answers, and the row statistics it is computed from. One method of the paper per file."""
