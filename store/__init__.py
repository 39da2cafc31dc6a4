"""The durable log: commit log, consume queues, index and recovery; sole owner of files."""
