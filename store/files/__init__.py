"""Files: disk access, mapped files, checkpoint, JSON tables, page cache, deferred deletion."""
