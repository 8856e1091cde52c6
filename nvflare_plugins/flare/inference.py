"""Where FLARE finds the components of jobs with a finished vertical model."""

from nvflare_plugins.flare.components import named_after

InferenceController, InferenceExecutor = named_after("vertical_inference")
