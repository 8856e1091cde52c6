"""The example of a noise mechanism."""
