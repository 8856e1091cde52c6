"""Where FLARE finds the components of FederBoost's vertical jobs."""

from nvflare_plugins.flare.components import named_after

BucketController, BucketExecutor = named_after("federboost_vertical")
