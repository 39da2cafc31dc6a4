"""An orderly end that fails no send while other brokers have the topics.

1. Routes show no write permission, here and at the name servers: producers go to other brokers when
   they next look, after 30 s at most. Messages that still come are stored.
2. Messages are refused, on which producers try another broker. A refusal is an answer; a closed
   connection would leave it unknown whether the message is stored.
3. The broker stops in order.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from attrs import define, field

from halfmq.remoting.codes import ResponseCode

from .disk.send_refusal import SendRefusal

logger = logging.getLogger(__name__)

REFUSED_S: Final = 1.0
"""Seconds in which messages are refused: what is on its way gets its answer."""


@define(eq=False, repr=False)
class Draining:
    """Ends the broker step by step."""

    _refusal: SendRefusal
    _withdraw: Callable[[], None]  # removes the write permission from the routes
    _has_producers: Callable[[], bool]
    _stop: Callable[[], None]
    reason: str = field(init=False, default="")
    """Why the broker is not ready; empty if it is."""

    def begin(self, wait_s: float) -> None:
        """Take the broker out of the routes, and end it when producers have had ``wait_s`` for it.

        A second call changes nothing.
        """
        if self.reason:
            return
        self.reason = "the broker is being drained"
        self._withdraw()
        wait_s = wait_s if self._has_producers() else 0.0
        logger.warning("event=draining wait_s=%.1f", wait_s)
        asyncio.get_running_loop().call_later(wait_s, self._refuse)

    def _refuse(self) -> None:
        reason = "the broker is being stopped: send to another one"
        self._refusal.begin("draining", ResponseCode.SERVICE_NOT_AVAILABLE, reason)
        asyncio.get_running_loop().call_later(REFUSED_S, self._stop)
