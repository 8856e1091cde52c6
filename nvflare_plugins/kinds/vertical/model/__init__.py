"""A vertical model in several hands."""
