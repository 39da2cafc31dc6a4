"""What the client's names stand on: connections, routes, sessions and TLS."""
