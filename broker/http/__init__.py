"""Health and metrics of the broker over HTTP."""
