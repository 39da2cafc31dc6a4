"""Adapters for frameworks. Each module needs an extra of its own name."""
