"""Disk limits, retention, and the refusal of sends when either or a failed flush asks for it."""
