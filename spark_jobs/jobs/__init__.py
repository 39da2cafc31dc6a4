"""The commands: one module per job, and the options, session and output that they share."""
