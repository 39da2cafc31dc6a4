"""Access control and TLS: principals, their rules, and what each request requires."""
