"""Requests that wait for their filter."""

from __future__ import annotations

from halfmq.broker.errors import NotYetError, RequestRefusedError
from halfmq.broker.filters.filters_in_use import SQL92, FiltersInUse
from halfmq.broker.limits.kept import FILTER_REQUEST_BYTES
from halfmq.remoting.codes import ResponseCode
from tests.support.broker_doubles import FakeConnection
from tests.support.patience import until


async def test_requests_that_wait_are_bounded_in_bytes() -> None:
    """The peer with the largest ones is refused, and everyone else is served."""
    filters, size = FiltersInUse(), 1 << 20
    greedy, modest = FakeConnection(), FakeConnection()
    answers: dict[object, list[RequestRefusedError | None]] = {greedy: [], modest: []}

    def ask(peer: FakeConnection, number: int, size: int) -> None:
        try:
            filters.compiled(SQL92, f"a = {number}", ResponseCode.SYSTEM_ERROR, peer)
        except NotYetError as later:
            later.wait(answers[peer].append, size)

    for number in range(60):
        ask(greedy, number, size)
    ask(modest, 100, 1)
    (used,) = (used for limit, used in filters.kept().items() if limit is FILTER_REQUEST_BYTES)
    assert used <= FILTER_REQUEST_BYTES.most
    await until(lambda: len(answers[greedy]) == 60 and len(answers[modest]) == 1)
    await filters.stop()

    refused = [one for one in answers[greedy] if one is not None]
    assert {one.code for one in refused} == {ResponseCode.SYSTEM_BUSY}
    assert 0 < len(refused) < 60
    assert answers[modest] == [None]
