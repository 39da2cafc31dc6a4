"""Internals of transactions: check-back, decisions, prepare of several messages, databases."""
