"""The outcome of an audit as a table, JSON, Parquet and one HTML file."""
