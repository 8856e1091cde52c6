"""Tuning and cross validation of vertical jobs in the preset exact: folds that only the party with the label knows."""
