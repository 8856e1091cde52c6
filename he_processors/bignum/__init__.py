"""Batches of big numbers modulo one odd number, on several backends behind one interface."""
