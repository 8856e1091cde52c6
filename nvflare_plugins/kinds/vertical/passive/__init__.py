"""A passive party: bins, node membership, and its own splits."""
