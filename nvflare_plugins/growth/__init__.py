"""XGBoost's trees, grown by the sites themselves: bins, histograms, splits, rows, trees, on sums that are integers."""
