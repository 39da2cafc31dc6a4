"""Sockets and requests: server, router, group commit of replies, long polling, name servers."""
