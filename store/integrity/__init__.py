"""Digests of files, and the repair of bits that a disk has flipped."""
