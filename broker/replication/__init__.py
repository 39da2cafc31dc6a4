"""Consumption message by message (pop)."""
