"""The operator command ``halfmq``: nouns of the client library and of the store in one place."""
