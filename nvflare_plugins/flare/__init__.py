"""The shell around VeilBoost that FLARE runs: transport, controllers, executors."""
