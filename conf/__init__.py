"""The commented default configuration, shipped beside the code."""
