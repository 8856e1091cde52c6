"""Where FLARE finds the components of jobs of private trees."""

from nvflare_plugins.flare.components import named_after

PrivateTreesController, PrivateTreesExecutor = named_after("private_trees")
