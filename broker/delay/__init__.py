"""Delayed messages: delay levels, delivery when due, and resuming after a crash."""
