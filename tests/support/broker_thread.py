"""A fake broker for clients that block: on the loop of a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from tests.support.fake_broker import FakeBroker


class BrokerThread:
    """Runs until it is closed; has a topic ``orders``."""

    def __init__(self) -> None:
        self.broker = FakeBroker()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.run(self.broker.start())
        self.broker.create_topic("orders")

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def close(self) -> None:
        self.run(self.broker.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
