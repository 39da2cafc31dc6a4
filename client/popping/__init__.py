"""Internals of consumers that share messages: pop, and the settlement of each message."""
