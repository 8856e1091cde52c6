"""Points of edwards25519 in batches, on several backends, and ristretto255 on top of them."""
