"""The data sources ``rocketmq-commitlog`` and ``rocketmq-consumequeue``."""
