"""The console: pages for operators of halfmq and RocketMQ brokers.

It shows and changes what ``halfmq.client.Admin`` can, and nothing else; ``halfmq console`` starts
it.
"""
