"""Tools for people: they look at a store's files, also while a broker runs, and write none."""
