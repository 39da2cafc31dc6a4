"""The network layer of the client: connections, routes, sessions, retries and TLS."""
