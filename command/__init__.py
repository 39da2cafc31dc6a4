"""The operator command ``halfmq``."""
