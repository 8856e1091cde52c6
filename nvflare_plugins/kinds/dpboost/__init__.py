"""DPBoost as a job under a trusted aggregator.

job.py says what a job says, site.py is a site's part, server.py the server's, model.py turns released trees into an
XGBoost model. The algorithm itself is in dp_components/dpboost.
"""
