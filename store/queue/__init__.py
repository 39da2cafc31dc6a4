"""Consume queues, and choosing what a pull gets."""
