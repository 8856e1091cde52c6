"""A job that stays: rows are scored one by one, or a few at once, while all parties hold their parts ready."""
