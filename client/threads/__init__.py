"""The async client for other threads than the event loop's: the base of the blocking client."""
