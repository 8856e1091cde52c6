"""FederBoost's vertical training as a job: randomised buckets are sent once, one party trains stock XGBoost on them.

job.py says what a job says; tables.py and description.py read a party's rows and what is public about its features;
payment.py pays for the releases; buckets.py and splits.py are the two messages; training.py is the active party's
XGBoost; sent_rows.py remembers whose buckets were sent; site.py puts a site's part together.
"""
