"""A2: how many trees share one set of gradients."""
