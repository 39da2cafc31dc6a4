"""Requests about messages: send, send back, pull, query."""
