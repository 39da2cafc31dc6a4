"""Requests about clients: heartbeats, routes, consumer offsets, queue locks."""
