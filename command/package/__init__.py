"""halfmq, a message broker for transactional half messages; see the packages in it."""

__version__: str


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 -- 20 ms that only this needs

        return version("halfmq")
    raise AttributeError(f"module 'halfmq' has no attribute {name!r}")
