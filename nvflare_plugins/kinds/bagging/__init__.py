"""Tree-based bagging: each round every site grows a tree on its own rows, and all sites take all of them."""
