"""Where FLARE finds the components of DPBoost jobs."""

from nvflare_plugins.flare.components import named_after

DpBoostController, DpBoostExecutor = named_after("dpboost")
