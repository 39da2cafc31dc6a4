"""Half messages: prepared, decided once, and asked about until they are decided."""
