"""Disk limits, retention, and the refusal of sends after a limit or a failed flush."""
