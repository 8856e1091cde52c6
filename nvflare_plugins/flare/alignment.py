"""Where FLARE finds the components of alignment jobs."""

from nvflare_plugins.flare.components import named_after

AlignmentController, AlignmentExecutor = named_after("alignment")
