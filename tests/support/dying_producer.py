"""A producer process that kills itself at one moment of a local transaction.

Run as a script: ``dying_producer.py NAMESRV GROUP DATABASE KEY MOMENT``. It prepares a half
message, inserts the key into the table ``orders`` and dies (SIGKILL) ``before`` or ``after`` the
local commit; its decision never leaves.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys

from halfmq.client import (
    ClientConfig,
    Decision,
    Message,
    MessageView,
    TransactionLedger,
    TransactionProducer,
)

TOPIC = "orders"


async def never_asked(_message: MessageView) -> Decision:
    """Answers nothing: another producer of the group is to be asked."""
    return Decision.UNKNOWN


async def main(namesrv: str, group: str, path: str, key: str, moment: str) -> None:
    """Prepare, write the row, and die."""
    database = sqlite3.connect(path)
    config = ClientConfig(namesrv=namesrv)
    async with (
        TransactionProducer(group, checker=never_asked, config=config) as producer,
        producer.transaction(Message(TOPIC, key.encode(), keys=key)) as transaction,
    ):
        database.execute("insert into orders values (?)", [key])
        TransactionLedger().record(database.cursor(), transaction.id)
        if moment == "after":
            database.commit()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
