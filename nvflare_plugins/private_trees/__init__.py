"""Differentially private federated trees, trained by stock XGBoost wherever it can ask for what a method releases.

job.py says what a job says, presets.py and methods.py which methods there are, default_2026_11.py ours. job_plan.py
lists what a job will release and prices it; summary.py puts that into words. site.py puts a site's part together:
payment.py is its ledger, and training.py (random trees), own_training.py (greedy trees and refined candidates, with
grown_forest.py) and greedy_training.py (histogram trees by XGBoost's own grower, where a job asks for it) train.
server.py is the part of a server that is trusted with exact sums. simulation.py runs the same in one process.
"""
