"""FederBoost's vertical mechanism (Tian et al.): each feature value leaves its party as one randomised bucket, once.

    edges = public_edges(features, 16)                                        edges.py: nothing of the data is used
    counts = release_cell_counts(columns, features, 16, epsilon_edges)        or: paid counts ...
    edges = paid_edges(counts.value, epsilon_edges, features, 16)         ... and equal-count buckets from them
    buckets = release_buckets(columns, edges, epsilon)                        randomised_buckets.py

Edges that are ranks of the data, as in the paper, are not offered: then one row's bucket depends on the other rows, and
the guarantee per value is lost. The active party trains on the buckets as on any integer features; its labels, and the
split sets it sends back, are not protected by this mechanism.
"""
