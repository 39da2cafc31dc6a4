"""Retries with exponential backoff and jitter, until a deadline.

A restarting broker refuses connections for a moment, and a busy one rejects requests. This should
cost latency and raise no error, so a send or a start is retried until ``send_timeout`` has passed.
The delay doubles from ``reconnect_delay_min`` to ``reconnect_delay_max``. Each delay is shortened
by up to half at random; otherwise all clients of a broker would reconnect in the same moment.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final

from halfmq.remoting.codes import ResponseCode

from ..config import ClientConfig
from ..errors import (
    AccessDeniedError,
    BrokerRefusedError,
    ClientError,
    ConnectError,
    ConnectionLostError,
    RequestTimeoutError,
    SendTimeoutError,
)

STALE_ROUTE_CODES: Final = frozenset({ResponseCode.TOPIC_NOT_EXIST, ResponseCode.NO_PERMISSION})
"""Response codes of a broker that no longer has the topic, or no longer accepts messages for it;
another one may."""
STALE_ROUTE_ATTEMPTS_MAX: Final = 3
"""Attempts that end with a stale route, as in the official client: a fresh route helps or waiting
does not."""

RandomFraction = Callable[[], float]
"""Returns a random number from 0 up to, but not including, 1."""


def backoff_seconds(
    failures: int, config: ClientConfig, random_fraction: RandomFraction = random.random
) -> float:
    """Return the delay before the next attempt; ``failures`` in a row is 1 or more."""
    doubled = config.reconnect_delay_min * 2.0 ** min(failures - 1, 30)
    return min(doubled, config.reconnect_delay_max) * (1 - random_fraction() / 2)


async def wait_before_retry(
    failures: Sequence[ClientError],
    config: ClientConfig,
    clock: Callable[[], float],
    deadline: float,
    *,
    ordered: bool = False,
    random_fraction: RandomFraction = random.random,
) -> bool:
    """Wait for the next attempt and return True, or return False at once if there is to be none.

    ``failures`` has the errors of all attempts so far. An ``ordered`` message that may have been
    stored is not retried: the copy could be stored after its successor.
    """
    last = failures[-1]
    if not (last.retriable or _is_stale_route(last)) or (ordered and outcome_unknown(last)):
        return False
    attempts_max = config.send_attempts_max
    if attempts_max is not None and len(failures) >= attempts_max:
        return False
    if _is_stale_route(last) and sum(map(_is_stale_route, failures)) >= STALE_ROUTE_ATTEMPTS_MAX:
        return False
    seconds = backoff_seconds(len(failures), config, random_fraction)
    if clock() + seconds >= deadline:
        return False
    await asyncio.sleep(seconds)
    return True


def _is_stale_route(error: ClientError) -> bool:
    return (
        isinstance(error, BrokerRefusedError)
        and not isinstance(error, AccessDeniedError)  # its sender is refused, not the topic
        and error.code in STALE_ROUTE_CODES
    )


def outcome_unknown(error: ClientError) -> bool:
    """Return whether the failed attempt may have been executed by the broker."""
    return isinstance(error, ConnectionLostError | RequestTimeoutError)


def final_error(failures: Sequence[ClientError], code: int, seconds: float) -> ClientError:
    """Return the error for the caller after these attempts.

    It is the last one with an unknown outcome, if there is one: "Connection refused" alone would
    mean that nothing was stored.
    """
    last = failures[-1]
    chosen = next((error for error in reversed(failures) if outcome_unknown(error)), last)
    if isinstance(chosen, RequestTimeoutError):
        error = SendTimeoutError(chosen.address, code, seconds, len(failures))
        error.__cause__ = last
        return error
    if chosen is not last:
        chosen.__cause__ = last
    elif isinstance(chosen, ConnectError):  # its text says all; where it was raised, nothing
        return chosen.with_traceback(None)
    return chosen
