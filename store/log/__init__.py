"""The commit log: append, group commit, read, scan."""
