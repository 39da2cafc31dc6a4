"""The client library: producers, transactional producers and consumers, async first."""
