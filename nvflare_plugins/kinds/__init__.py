"""Kinds of jobs: a folder each, and a row of ``flare/kinds.py``."""
