"""A party's own Dask workers, each of which holds a part of its rows. See ``workers``: the one interface."""
