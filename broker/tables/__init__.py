"""What the broker knows: topics, groups, consumer offsets, connected clients, queue locks."""
