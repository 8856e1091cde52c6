"""Mechanisms: each returns a ``Release``, noised data together with the event that pays for them.

All draw exactly on the integers from the operating system's randomness: floating-point noise leaks its argument through
the low bits (Mironov 2012), and a floating-point probability is not the one that was accounted.
"""
