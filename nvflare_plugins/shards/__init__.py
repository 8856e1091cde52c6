"""A site's rows in shards: the same work over each, in step with the one process that speaks for the site.

A shard's work runs where its rows are: in a thread of this process, or on a worker of the site's own cluster. It asks
and waits. All shards ask the same at the same time; one answer, made of all that they have asked with, goes back to
all. So a work that sees rows only through what it asks gives the same everywhere, however its shards are hosted.
"""
