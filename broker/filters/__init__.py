"""SQL92 filters: expressions over the properties of messages, evaluated by the broker."""
