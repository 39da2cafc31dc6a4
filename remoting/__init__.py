"""RocketMQ's wire protocol, sans-IO: bytes in, commands out, and back."""
