"""Recipes in the style of FLARE 2.9: what a user calls from Python."""
