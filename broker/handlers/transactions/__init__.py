"""Requests about transactions: prepare and end, one or many."""
