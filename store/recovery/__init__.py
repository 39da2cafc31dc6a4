"""What a start does: find the end of the log, rebuild queues, fill damaged ranges."""
