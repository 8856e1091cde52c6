"""Computation between two parties that leaves its inputs closed: oblivious transfer, garbled circuits, best splits."""
