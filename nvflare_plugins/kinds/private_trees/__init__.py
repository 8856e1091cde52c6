"""Differentially private federated trees: everything that is released stands in one list before training begins.

job.py holds what a job says, presets.py and methods.py which methods there are, default_2026_12.py and
default_2026_11.py ours, targets.py which of them train which labels. releases.py lists what a training will release, in
order, each with its noise and the event that pays for it; job_plan.py prices a job by that list, summary.py puts it
into words. site.py puts a site's part together: payment.py is its ledger, noisy_sums.py releases what the list holds,
and forest_trainer.py asks for it, with the histograms of node_histograms.py. server.py is the part of a server that is
trusted with exact sums.
"""
