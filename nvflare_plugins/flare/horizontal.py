"""Where FLARE finds the components of horizontal jobs."""

from nvflare_plugins.flare.components import named_after

HorizontalController, HorizontalExecutor = named_after("horizontal")
