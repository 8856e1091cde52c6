"""What kinds of jobs over pooled rows share: preparation, floors, cut points, protected sums, grown trees, shards."""
