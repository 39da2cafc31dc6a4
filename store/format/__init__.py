"""Byte layouts of everything on disk, as pure functions; compatible with Apache RocketMQ 5.x."""
