"""C1: how trees come to their splits."""
