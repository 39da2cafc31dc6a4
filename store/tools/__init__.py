"""Read-only tools for operators; they work on a store's files, also while a broker runs."""
