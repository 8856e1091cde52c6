"""``veilboost plan``: what a training will take, before it runs."""
