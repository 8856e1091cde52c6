"""Contracts that a part written by others can be held to, under pytest and with nothing but this package installed."""
