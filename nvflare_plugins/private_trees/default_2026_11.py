"""The default method, frozen on 2026-11-21.

Chosen on development sets only (credit2, adult, bank, nomao, higgs_20k); nothing in it depends on the data it will be
trained on, and nothing may be changed in this file: a better default gets a new dated file.

* One leaf query of sensitivity 1 for (G, 3.330 H), exact Gaussian composition.
* A ridge of three standard deviations of the noise on a leaf's gradient sum.
* Half of the candidates uniform over public bounds, half at private quantiles, for a tenth of mu^2.
* Trees of one feature and trees of all features by turns.
"""

from __future__ import annotations

from dataclasses import replace

from dp_components.leaf_weights.query import LeafQuery
from nvflare_plugins.private_trees.methods import CandidateSource, Interactions, Method, SplitMethod, WeightUpdate

DEFAULT = Method(
    "default 2026-11",
    SplitMethod.TOTALLY_RANDOM,
    WeightUpdate.NEWTON,
    candidates=CandidateSource.MIXED,
    interactions=Interactions.ALTERNATING,
    n_trees=200,
    depth=4,
    n_candidates=32,
    batch_size=1,
    learning_rate=0.3,
    ridge=1.0,
    noise_ridge=3.0,
    clip=2.0,
    query=LeafQuery.JOINT,
    candidate_share=0.1,
)

FEW_ROUNDS = replace(DEFAULT, name="few rounds 2026-11", n_trees=240, batch_size=10, learning_rate=1.5)
"""240 trees in 24 boosting rounds: 25 messages with the one for private quantiles."""
