"""The rules by which records are judged; no Spark in here."""
