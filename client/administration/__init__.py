"""What ``Admin`` does, one module a subject; users import it from ``halfmq.client``."""
