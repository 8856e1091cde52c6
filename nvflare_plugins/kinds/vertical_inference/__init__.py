"""Jobs with a finished vertical model: prediction, explanation, merging."""
