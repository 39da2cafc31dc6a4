"""The key index: its files, and building it some time after records are appended."""
