"""Check-back: due checks, the producers they are sent to, and parking without an answer."""
