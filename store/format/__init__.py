"""Byte layouts of everything on disk, as pure functions; byte-compatible with Apache RocketMQ 5.x."""
