"""FLARE plugins: mediators, controllers, executors and recipes for private federated XGBoost."""

import os

# XGBoost's threads wait for one another by spinning, for milliseconds unless told otherwise. Here they wait for other
# sites most of the time, and in FLARE's simulator all sites share the cores: rounds took some 14 times as long there,
# measured on a busy machine. So many turns are some microseconds: the threads of one training still find each other
# awake. The library reads this when it is loaded, hence before anything imports XGBoost.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
