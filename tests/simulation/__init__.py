"""Broker, clients, network, disk and clock in one process, on one seeded event loop."""
