"""The command ``veilboost``."""
