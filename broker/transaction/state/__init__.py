"""What transactions keep in memory: states, undecided halves, latest decisions, counters."""
