"""What a consumer is made of: pulls, windows of messages in flight, offsets, rebalance, filters."""
