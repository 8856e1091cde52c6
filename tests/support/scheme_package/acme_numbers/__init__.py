"""Additive schemes of an imaginary firm."""
