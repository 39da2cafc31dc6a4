"""What producers do beside sending: batches that fill by themselves."""
