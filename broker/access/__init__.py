"""Who may do what: principals and their rules, and the guard in front of the router."""
