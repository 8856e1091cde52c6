"""The shell around VeilBoost that FLARE runs: transport, controller, executor and the set-up of a site."""
