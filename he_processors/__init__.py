"""Cryptographic processors: number formats, masks, homomorphic encryption, sealing.

Pure library: imports neither nvflare nor xgboost. What crosses this boundary are numpy arrays, bytes and
frozen value classes.
"""
