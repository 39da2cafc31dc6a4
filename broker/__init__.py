"""The broker process: where the network meets the disk."""
