"""A party's part of vertical training with its rows in shards, one at each of its own workers."""
