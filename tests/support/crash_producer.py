"""A producer process that dies between its local commit and its decision.

Run as a script: ``crash_producer.py NAMESRV GROUP LEDGER KEY…``. For each key it prepares a half
message, inserts the key into the SQLite ledger, and for the last one kills itself (SIGKILL) before
the decision leaves. Earlier keys are committed in the usual way.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys

from halfmq.client import ClientConfig, Decision, Message, MessageView, TransactionProducer

TOPIC = "ledger"


async def never_asked(_message: MessageView) -> Decision:
    """Answers nothing: another producer of the group is to be asked."""
    return Decision.UNKNOWN


async def main(namesrv: str, group: str, ledger: str, keys: list[str]) -> None:
    """Commit every key but the last, whose local transaction is committed and no more."""
    database = sqlite3.connect(ledger)
    config = ClientConfig(namesrv=namesrv)
    async with TransactionProducer(group, checker=never_asked, config=config) as producer:
        for key in keys:
            async with producer.transaction(Message(TOPIC, key.encode(), keys=key)):
                with database:
                    database.execute("insert into ledger values (?)", [key])
                if key == keys[-1]:
                    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
