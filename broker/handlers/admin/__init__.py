"""Requests of operators about topics, groups, offsets, transactions, settings and users."""
