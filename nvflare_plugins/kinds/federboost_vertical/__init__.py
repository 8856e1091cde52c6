"""FederBoost's vertical training as a job: randomised buckets are sent once, one party trains stock XGBoost on them.

job.py says what a job says; tables.py reads a party's rows, says what is public about its features, and holds the two
messages; payment.py pays for the releases and remembers whose buckets were sent; training.py is a site's part, the
active party's XGBoost among it.
"""
