"""Files of a store and the records in them; no Spark in here."""
