"""Sharing the event loop: background work in slices, tickers, and reads on threads."""
