"""What the additively homomorphic schemes share: structured primes, randomisers, the pool, re-randomisation."""
