"""Differentially private federated trees: everything that is released stands in one list before training begins.

job.py holds what a job says, methods.py which methods there are and which of them train which labels. plan.py lists
what a training will release, in order, each with its noise and the event that pays for it; planner.py puts it into
words. training.py is a site's part: noisy_sums.py releases what the list holds, also at a server that is trusted with
exact sums, and forest.py asks for it. shard.py is the part of a worker that holds some of the rows.
"""
