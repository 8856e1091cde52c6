"""Additive ElGamal on edwards25519: several messages under one randomiser, sums read back as small logarithms."""
