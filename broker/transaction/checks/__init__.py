"""Check-back: what is due, whom to ask, and parking when nobody answers."""
