"""What transactions are made of: check-back, decisions, several messages, databases."""
