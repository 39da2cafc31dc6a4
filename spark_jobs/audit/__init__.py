"""What an audit finds: states of transactions, faults, figures."""
