"""Ciphertext histograms: which ciphertexts to multiply for which bin, and what the key owner checks afterwards."""
