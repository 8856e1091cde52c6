"""Where FLARE finds the components of vertical jobs."""

from nvflare_plugins.flare.components import named_after

VerticalController, VerticalExecutor = named_after("vertical")
