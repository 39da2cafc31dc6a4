"""Half messages: prepared, decided once, and checked until they are decided."""
