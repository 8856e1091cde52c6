"""DPBoost as a job under a trusted aggregator.

job.py says what a job says, training.py is a site's part, server.py the server's. The algorithm itself is in
dp_components/dpboost.
"""
