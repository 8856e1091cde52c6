"""The tables and figures of the five papers, ours beside theirs: what ``make bench-papers`` runs and writes down."""
