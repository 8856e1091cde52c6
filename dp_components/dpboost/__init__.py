"""DPBoost (Li et al., AAAI 2020): boosting with a pure epsilon and a trusted aggregator, with its errors corrected.

One part of the paper per file: gradient_based_data_filtering.py (GDF), geometric_leaf_clipping.py (GLC),
single_tree.py (Algorithm 1, with the exponential mechanism), ensemble_of_ensembles.py (EoE: Algorithm 2).

What differs from the paper, because the paper's version is not private: the gain's sensitivity is 3 g*^2, leaves are
noised with the leaf budget, split candidates are public and all of them always run, trees are complete (no choice of
the next leaf by its exact gain, no early stop), rows choose their tree by a keyed hash, there is no base score.
Noised leaves are clipped once more, which costs nothing; a regression may pay for its start.
"""
