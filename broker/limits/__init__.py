"""The one account of what the broker keeps for its peers: how much, and who ends first.

``kept`` declares every limit. The place that keeps something takes its limit from there, the
composition root names its use (``account``), and ``halfmq broker metrics`` shows both. The table
"Memory that clients can take" of ``docs/operations.md`` is written from the declarations by
``python -m tests.limits``. A constant ``..._MAX`` elsewhere in the broker limits what is not kept:
a test has the list of those.
"""
