"""The archive of a store: its full files in an object store."""
