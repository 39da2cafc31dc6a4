"""Digests of files, and turning back bits that a disk has flipped."""
