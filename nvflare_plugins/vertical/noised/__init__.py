"""The preset noised: what is added to the sums of a passive party, what it costs, and how the reader copes."""
