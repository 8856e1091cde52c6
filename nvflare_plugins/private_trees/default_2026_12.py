"""The default method, frozen on 2026-11-22 for December.

Chosen on development sets only (credit2, adult, bank, nomao, higgs_20k, and generated ones); nothing in it depends on
the data it will be trained on, but for what its own releases tell, and nothing may be changed in this file: a better
default gets a new dated file.

What differs from default_2026_11:

* Gradients are clipped at 0.6, so that one leaf query has sensitivity 0.6 in place of 1.
* Trees over all features draw them by the gains of earlier noised leaves; trees of one feature go round as before.
* 300 trees, and a ridge of five standard deviations of the noise.
"""

from __future__ import annotations

from dataclasses import replace

from dp_components.leaf_weights.query import LeafQuery
from nvflare_plugins.private_trees import default_2026_11
from nvflare_plugins.private_trees.methods import Interactions

DEFAULT = replace(
    default_2026_11.DEFAULT,
    name="default 2026-12",
    interactions=Interactions.INFORMED,
    n_trees=300,
    noise_ridge=5.0,
    query=LeafQuery.CLIPPED,
)
