"""Requests of operators: transactions, users and policies."""
