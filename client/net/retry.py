"""When a call that failed is made again: after growing pauses, until its time is up.

A broker that restarts refuses connections for a moment, and a busy one refuses requests. Such a
moment must cost latency and no error, so a send or a start goes on until ``send_timeout`` is over.
Pauses double from ``reconnect_delay_min`` to ``reconnect_delay_max``. Each is shortened by up to
half at random, or all clients of a broker would come back in the same moment.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final

from halfmq.remoting.codes import ResponseCode

from ..config import ClientConfig
from ..errors import (
    BrokerRefusedError,
    ClientError,
    ConnectionLostError,
    RequestTimeoutError,
    SendTimeoutError,
)

ROUTE_IS_OLD: Final = frozenset({ResponseCode.TOPIC_NOT_EXIST, ResponseCode.NO_PERMISSION})
"""The broker that answers so has lost the topic, or takes no messages for it any more."""
ROUTES_TRIED_MAX: Final = 3
"""Attempts that end so, the official client's number: a fresh route mends it, or time does not."""

Chance = Callable[[], float]
"""Gives numbers from 0 up to, but not including, 1."""


def pause(failures: int, config: ClientConfig, chance: Chance = random.random) -> float:
    """Seconds to wait after so many failures in a row, 1 or more."""
    doubled = config.reconnect_delay_min * 2.0 ** min(failures - 1, 30)
    return min(doubled, config.reconnect_delay_max) * (1 - chance() / 2)


async def may_try_again(
    failures: Sequence[ClientError],
    config: ClientConfig,
    clock: Callable[[], float],
    deadline: float,
    *,
    ordered: bool = False,
    chance: Chance = random.random,
) -> bool:
    """Wait for the next attempt and return True; or return False at once if there is none.

    ``failures`` are the errors of all attempts, the last of which was just made. After an
    ``ordered`` one that may have worked there is none: the copy could land after its successor.
    """
    last = failures[-1]
    if not last.retriable or (ordered and leaves_doubt(last)):
        return False
    attempts_max = config.send_attempts_max
    if attempts_max is not None and len(failures) >= attempts_max:
        return False
    if _route_is_old(last) and sum(map(_route_is_old, failures)) >= ROUTES_TRIED_MAX:
        return False
    seconds = pause(len(failures), config, chance)
    if clock() + seconds >= deadline:
        return False
    await asyncio.sleep(seconds)
    return True


def _route_is_old(error: ClientError) -> bool:
    return isinstance(error, BrokerRefusedError) and error.code in ROUTE_IS_OLD


def leaves_doubt(error: ClientError) -> bool:
    """Whether the attempt may have worked although it failed here."""
    return isinstance(error, ConnectionLostError | RequestTimeoutError)


def final_error(failures: Sequence[ClientError], code: int, seconds: float) -> ClientError:
    """Return the caller's error after these attempts: the last that left a doubt, if any did.

    "Connection refused" alone would say that nothing was stored.
    """
    last = failures[-1]
    chosen = next((error for error in reversed(failures) if leaves_doubt(error)), last)
    if isinstance(chosen, RequestTimeoutError):
        error = SendTimeoutError(chosen.address, code, seconds, len(failures))
        error.__cause__ = last
        return error
    if chosen is not last:
        chosen.__cause__ = last
    return chosen
