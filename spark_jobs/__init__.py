"""PySpark jobs that audit a commit log without the broker."""
