"""Private set intersection: which rows the parties of a vertical job have in common, and in which order."""
