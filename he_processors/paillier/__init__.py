"""Paillier's cryptosystem (Eurocrypt 1999) with g = n + 1; keys and ciphertexts interchange with ``phe``."""
