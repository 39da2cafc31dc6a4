"""Answers to requests, one module per subject; each offers a table from request code to handler."""
