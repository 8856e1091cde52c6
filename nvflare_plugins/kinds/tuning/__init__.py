"""Tuning and cross validation: many parameter sets, each trained on all folds but one, scored on that one."""
