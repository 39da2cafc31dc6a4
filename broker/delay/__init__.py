"""Delayed messages: delay levels, their delivery when due, and finding again what was delivered."""
