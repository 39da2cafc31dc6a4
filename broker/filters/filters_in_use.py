"""The cache of compiled SQL92 filters.

Consumers of many groups may have the same expression, and each pull needs its filter, so filters
are cached by expression. They are compiled on a thread, because the first one imports the parser,
and a long expression takes tens of milliseconds.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple, Protocol

from halfmq.remoting.bodies import EXPRESSION_LENGTH_MAX
from halfmq.remoting.codes import ResponseCode

from ..errors import FilterSyntaxError, NotYetError, RequestRefusedError
from ..limits.kept import FILTER_BYTES, FILTER_REQUEST_BYTES, Kept
from ..loop.services import Service
from .compiled_filter import OPERATOR_SIZE, CompiledFilter

logger = logging.getLogger(__name__)

SQL92: Final = "SQL92"
"""The expression type. Source: RocketMQ ``ExpressionType``."""

FILTER_WEIGHT: Final = 1_024
"""Estimated bytes of a filter without its operators; its text counts twice in addition."""

WAITING_MAX: Final = 1_024
"""Requests that wait for a filter; of more, the latest one of the connection with most of them is
refused."""

WAITING_MAX_OF_ONE: Final = 64
"""Such requests of one connection. Connections take turns, so each waits for one filter of each
other connection."""

PAUSE_S: Final = 0.0005
"""Seconds for which the thread yields to the event loop, after some tokens of a long expression."""

Waiting = Callable[[RequestRefusedError | None], None]


class _Request(NamedTuple):
    """A request that waits for its filter."""

    expression: str
    code: ResponseCode  # of the refusal if the expression is wrong
    answer: Waiting
    size: int  # bytes of the request


class Owner(Protocol):
    """A connection that requests filters."""

    @property
    def closed(self) -> bool: ...


class FiltersInUse(Service):
    """Compiled filters by expression; of wrong ones nothing is kept."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sql-filter")
        self._known: OrderedDict[str, CompiledFilter] = OrderedDict()  # the oldest use first
        self._weight = 0
        self._queues: dict[Owner, deque[_Request]] = {}  # in order of turns
        self._waiting_bytes = 0
        self._is_compiling = False

    async def stop(self) -> None:
        """Wait for the filter that is being compiled, and compile no more."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def compiled(
        self, kind: str, expression: str, code: ResponseCode, connection: Owner
    ) -> CompiledFilter:
        """Return the filter of an expression for a request on this connection.

        Raises:
            RequestRefusedError: The kind is not SQL92, or SQL92 is disabled; with ``code``, the
                expression is invalid, and the remark says at which character.
            NotYetError: The filter is not compiled yet.
        """
        if kind != SQL92 or not self._enabled:
            raise RequestRefusedError(
                f"The broker does not support consumer to filter message by {kind}"
            )
        if len(expression) > EXPRESSION_LENGTH_MAX:
            raise RequestRefusedError(
                f"the SQL92 filter has {len(expression)} characters, "
                f"the limit is {EXPRESSION_LENGTH_MAX}",
                code,
            )
        found = self._known.get(expression)
        if found is None:
            raise NotYetError(partial(self._wait, expression, code, connection))
        self._known.move_to_end(expression)
        return found

    def _wait(
        self,
        expression: str,
        code: ResponseCode,
        connection: Owner,
        on_compiled: Waiting,
        size: int,
    ) -> None:
        """Compile a filter when it is the turn of its connection."""
        queue = self._queues.setdefault(connection, deque())
        queue.append(_Request(expression, code, on_compiled, size))
        self._waiting_bytes += size
        is_full = (
            sum(map(len, self._queues.values())) > WAITING_MAX
            or self._waiting_bytes > FILTER_REQUEST_BYTES.most
        )
        if is_full or len(queue) > WAITING_MAX_OF_ONE:
            longest = max(self._queues, key=self._weight_of)
            self._take(longest if is_full else connection, -1).answer(
                RequestRefusedError("too many filters are being compiled", ResponseCode.SYSTEM_BUSY)
            )
        if not self._is_compiling:
            self._compile_next()

    def _take(self, connection: Owner, index: int) -> _Request:
        """Remove a request of a connection, whose others then come after all others."""
        queue = self._queues.pop(connection)
        taken = queue[index]
        del queue[index]
        self._waiting_bytes -= taken.size
        if queue:
            self._queues[connection] = queue
        return taken

    def _weight_of(self, connection: Owner) -> int:
        return sum(FILTER_WEIGHT + one.size for one in self._queues[connection])

    def _compile_next(self) -> None:
        """Compile the next filter, or serve its request if another one has needed it as well."""
        self._is_compiling = bool(self._queues)
        if not self._queues:
            return
        connection = next(iter(self._queues))
        request = self._take(connection, 0)
        loop = asyncio.get_running_loop()
        if connection.closed or request.expression in self._known:
            loop.call_soon(self._serve, request, None)  # one in each pass
            return
        future = loop.run_in_executor(self._thread, _compile, request.expression)
        future.add_done_callback(partial(self._done, request))

    def _done(self, request: _Request, done: asyncio.Future[CompiledFilter]) -> None:
        if done.cancelled():
            return
        refusal = None
        match done.exception():
            case None:
                self._keep(request.expression, done.result())
            case FilterSyntaxError() as error:
                refusal = RequestRefusedError(str(error), request.code)
            case error:
                logger.error(
                    "event=filter_not_compiled filter=%.200r", request.expression, exc_info=error
                )
                refusal = RequestRefusedError(
                    "the filter could not be compiled, see the broker's log"
                )
        self._serve(request, refusal)

    def _serve(self, request: _Request, refusal: RequestRefusedError | None) -> None:
        try:
            request.answer(refusal)
        finally:
            self._compile_next()

    def _keep(self, expression: str, compiled: CompiledFilter) -> None:
        self._known[expression] = compiled
        self._weight += _weight(expression, compiled)
        while self._weight > FILTER_BYTES.most:
            self._weight -= _weight(*self._known.popitem(last=False))

    def kept(self) -> Kept:
        return {FILTER_BYTES: self._weight, FILTER_REQUEST_BYTES: self._waiting_bytes}


def _weight(expression: str, compiled: CompiledFilter) -> int:
    return FILTER_WEIGHT + 2 * len(expression) + OPERATOR_SIZE * compiled.operators


def _compile(expression: str) -> CompiledFilter:
    from .grammar import parse  # noqa: PLC0415  # slow to import: see there

    return parse(expression, pause=lambda: time.sleep(PAUSE_S))
