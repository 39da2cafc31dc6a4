"""What transactions keep in memory: their states, the undecided ones, the latest decisions."""
