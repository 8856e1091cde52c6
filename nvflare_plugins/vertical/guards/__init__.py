"""What a passive party does against what sums per bin reveal."""
