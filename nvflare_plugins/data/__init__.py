"""A site's data: how it is declared, loaded, described, named and recognised again."""
