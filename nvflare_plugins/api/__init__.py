"""What stands behind ``import veilboost``: a federation of the caller's own tables in FLARE's simulator."""
