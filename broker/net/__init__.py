"""Connections and requests: server, router, release of replies, long polling, registration."""
