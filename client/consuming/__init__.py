"""Internals of the consumer: pulling, messages in flight, offsets, rebalance, filters."""
