"""How fast the broker is, beside the limits of the machine and beside Apache RocketMQ."""
