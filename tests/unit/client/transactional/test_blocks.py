"""How a block is left, with a real ledger: row and message are both there, or neither.

Exceptions and cancellations come at every await of an async block and at every line of a blocking
one, rather than at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from halfmq.client import (
    ClientError,
    ConfigurationError,
    Decision,
    MessageView,
    Transaction,
    TransactionFencedError,
    TransactionLedger,
    TransactionListener,
    TransactionNotCommittedError,
    TransactionNotRecordedError,
    TransactionProducer,
    blocking,
)
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from tests.support.broker_thread import BrokerThread
from tests.support.client_loops import in_steady_time, on_both_loops
from tests.support.client_transactions import (
    COMMIT,
    MESSAGE,
    QUICK,
    ROLLBACK,
    LocalError,
    new_producer,
)
from tests.support.fake_broker import FakeBroker, Peer, until
from tests.support.fake_transactions import Half
from tests.support.interruptions import KINDS, InterruptionError, Kind, interrupted, raising_at_call
from tests.support.order_book import OrderBook

SUSPENSIONS_MAX = 40
"""More than any block here has; a test that gets there would run for ever."""
CALLS_MAX = 1000


@pytest.fixture
def book(tmp_path: Path) -> OrderBook:
    return OrderBook(tmp_path / "orders.db")


def producer_of(
    broker: FakeBroker, checker: Callable[[MessageView], Decision]
) -> TransactionProducer:
    return TransactionProducer("orders-tx", checker, namesrv=broker.address, config=QUICK)


async def settled(broker: FakeBroker) -> set[str]:
    """Have the broker ask about what is undecided; return the ids of what it delivered."""
    for half in list(broker.halves.values()):

        def decided(half: Half = half) -> bool:
            return any(half.decisions) or not broker.check(half)

        await until(decided)
    return {str(MessageView(m, "broker-a").transaction_id) for m in broker.messages("orders")}


async def work(producer: TransactionProducer, book: OrderBook, threads: Executor) -> None:
    """A block that saves in a worker thread, which no cancellation can stop."""
    async with producer.transaction(MESSAGE) as tx:
        await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(threads, book.save, tx.id)
        await asyncio.sleep(0)


@on_both_loops
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("twice", [False, True])
async def test_row_and_message_agree_wherever_an_async_block_is_interrupted(
    broker: FakeBroker, book: OrderBook, kind: Kind, twice: bool
) -> None:
    """Every await is interrupted once, and a second time soon after the first."""
    for first in range(1, SUSPENSIONS_MAX):
        reached = 0
        for second in range(first + 1, first + 5) if twice else [first]:
            async with producer_of(broker, book.check) as producer:
                with ThreadPoolExecutor() as threads:
                    block = work(producer, book, threads)
                    with contextlib.suppress(InterruptionError, asyncio.CancelledError):
                        reached = await interrupted(block, {first, second}, kind)
                    forget_cancellations()
                delivered = await settled(broker)
            assert delivered == book.saved, (first, second)
        if 0 < reached < first:
            break  # it had ended before

    assert reached >= 5
    assert len(broker.halves) > reached
    assert delivered


def forget_cancellations() -> None:
    task = asyncio.current_task()
    assert task is not None
    while task.cancelling():
        task.uncancel()


@on_both_loops
@pytest.mark.parametrize("before", [True, False])
async def test_a_thread_that_runs_on_after_a_time_limit_is_fenced_or_delivered(
    broker: FakeBroker, book: OrderBook, before: bool
) -> None:
    """Its row is inserted before the check, or not at all."""
    entered, go_on = threading.Event(), threading.Event()
    fenced: list[str] = []

    def save(tx_id: str) -> None:
        if before:
            book.save(tx_id)
        entered.set()
        go_on.wait(60)
        if not before:
            try:
                book.save(tx_id)
            except TransactionFencedError:
                fenced.append(tx_id)

    async def limited(tx: Transaction, threads: Executor) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60) as limit, tx:
            saving = loop.run_in_executor(threads, save, tx.id)
            await until(entered.is_set)
            limit.reschedule(loop.time())
            await saving

    with ThreadPoolExecutor() as threads:
        async with producer_of(broker, book.check) as producer:
            tx = producer.transaction(MESSAGE)
            with pytest.raises(TimeoutError):
                await limited(tx, threads)
            go_on.set()

    assert broker.half_of(tx.id).decisions == [COMMIT if before else ROLLBACK]
    assert book.saved == ({tx.id} if before else set())
    assert fenced == ([] if before else [tx.id])


@on_both_loops
async def test_a_driver_that_raises_after_its_commit_is_delivered(
    broker: FakeBroker, book: OrderBook
) -> None:
    """The connection broke before the answer; the row is committed."""

    def save(tx_id: str) -> None:
        book.save(tx_id)
        raise LocalError

    async with producer_of(broker, book.check) as producer:
        with pytest.raises(LocalError):
            async with producer.transaction(MESSAGE) as tx:
                save(tx.id)

    assert broker.half_of(tx.id).decisions == [COMMIT]


@on_both_loops
async def test_recorded_twice_is_fenced_and_delivered(broker: FakeBroker, book: OrderBook) -> None:
    """The second attempt fails, but the first one has committed."""

    def save_twice(tx_id: str) -> None:
        book.save(tx_id)
        with closing(book.connect()) as connection, connection:
            book.ledger.record(connection.cursor(), tx_id)

    async with producer_of(broker, book.check) as producer:
        with pytest.raises(TransactionFencedError):
            async with producer.transaction(MESSAGE) as tx:
                save_twice(tx.id)

    assert tx.id in book.saved
    assert broker.half_of(tx.id).decisions == [COMMIT]


# -- a block that forgets the ledger


@on_both_loops
async def test_a_block_that_records_nothing_is_an_error_and_left_to_the_check(
    broker: FakeBroker, book: OrderBook
) -> None:
    """Without a row no check could answer COMMIT."""
    async with producer_of(broker, book.check) as producer:
        with pytest.raises(TransactionNotRecordedError, match=r"ledger\.record") as caught:
            async with producer.transaction(MESSAGE) as tx:
                pass
        assert (caught.value.transaction_id, tx.decision) == (tx.id, Decision.UNKNOWN)
        assert broker.half_of(tx.id).decisions == []
        assert await settled(broker) == set()

    assert broker.half_of(tx.id).decisions == [ROLLBACK]
    with pytest.raises(TransactionFencedError):
        book.save(tx.id)


@on_both_loops
async def test_a_block_that_records_nothing_may_decide_by_itself(
    broker: FakeBroker, book: OrderBook
) -> None:
    async with producer_of(broker, book.check) as producer:
        async with producer.transaction(MESSAGE) as nothing_to_do:
            nothing_to_do.rollback()
        async with producer.transaction(MESSAGE) as elsewhere:
            elsewhere.decide(Decision.COMMIT)

    assert [half.decisions for half in broker.halves.values()] == [[ROLLBACK], [COMMIT]]


@on_both_loops
async def test_a_ledger_that_cannot_tell_leaves_an_unrecorded_block_undecided(
    broker: FakeBroker, tmp_path: Path
) -> None:
    """Its database does not answer: nothing is committed, and the broker will check."""
    check = TransactionLedger().checker(lambda: sqlite3.connect(tmp_path / "none" / "x.db"))
    async with producer_of(broker, check) as producer:
        with pytest.raises(TransactionNotRecordedError):
            async with producer.transaction(MESSAGE) as tx:
                pass

    assert broker.half_of(tx.id).decisions == []


@on_both_loops
@pytest.mark.parametrize("how", ["another ledger", "statement", "another process", "a wrapper"])
async def test_however_it_was_recorded_it_commits(
    broker: FakeBroker, book: OrderBook, how: str
) -> None:
    """By another ledger object of the table, an async driver, or another process."""
    check = book.check
    if how == "a wrapper":

        @functools.wraps(check)
        def check(message: MessageView) -> Decision:
            return book.check(message)

    async with producer_of(broker, check) as producer, producer.transaction(MESSAGE) as tx:
        if how == "a wrapper":
            await asyncio.to_thread(book.save, tx.id)
        with closing(book.connect()) as connection, connection:
            if how == "another ledger":
                TransactionLedger().record(connection.cursor(), tx.id)
            elif how == "statement":
                connection.execute(*book.ledger.statement(tx.id, "qmark"))
            elif how == "another process":
                sql, values = book.ledger.statement("t", "qmark")
                connection.execute(sql, (tx.id, *list(values)[1:]))

    assert broker.half_of(tx.id).decisions == [COMMIT]


@on_both_loops
async def test_another_table_is_not_the_checkers_ledger(
    broker: FakeBroker, book: OrderBook
) -> None:
    """The checker would not find the row."""
    other = TransactionLedger("other")
    with closing(book.connect()) as connection:
        other.create_table(connection)

        def save(tx_id: str) -> None:
            with connection:
                other.record(connection.cursor(), tx_id)

        async with producer_of(broker, book.check) as producer:
            with pytest.raises(TransactionNotRecordedError):
                async with producer.transaction(MESSAGE) as tx:
                    save(tx.id)


# -- a block that ends normally, and a look at its row


class Tunnel:
    """Connections to the book's file, each from a test that says whether there are any."""

    def __init__(self, book: OrderBook) -> None:
        self.book = book
        self.broken = False
        self.free = threading.Event()
        self.free.set()

    def __call__(self) -> sqlite3.Connection:
        self.free.wait(60)
        if self.broken:
            raise sqlite3.OperationalError("no connection")
        return self.book.connect()


@in_steady_time
@pytest.mark.parametrize("ends", ["normally", "by an exception"])
@pytest.mark.parametrize("database", ["down", "without a free connection"])
async def test_a_database_that_does_not_answer_leaves_a_recorded_block_to_the_broker(
    broker: FakeBroker, book: OrderBook, ends: str, database: str
) -> None:
    """As far as anybody knows its row is committed: no error, and no wait for a pool's limit."""
    tunnel = Tunnel(book)
    config = replace(QUICK, own_check_timeout=0.05)
    checker = book.ledger.checker(tunnel)
    async with new_producer(broker, checker, config) as producer:
        with contextlib.suppress(LocalError):
            async with producer.transaction(MESSAGE) as tx:
                book.save(tx.id)
                tunnel.broken = database == "down"
                if not tunnel.broken:
                    tunnel.free.clear()
                if ends != "normally":
                    raise LocalError
        assert (tx.decision, tx.decided) == (Decision.UNKNOWN, False)
        assert broker.half_of(tx.id).decisions == []
        tunnel.broken = False
        tunnel.free.set()
        assert await settled(broker) == {tx.id}


@on_both_loops
@pytest.mark.parametrize("still_open", [True, False])
async def test_an_error_says_why_a_recorded_row_is_not_there(
    broker: FakeBroker, book: OrderBook, still_open: bool
) -> None:
    """The transaction is open, or there is no row; it keeps no connection."""

    def save(tx_id: str) -> None:
        book.ledger.record(connection, tx_id)
        if not still_open:
            connection.rollback()

    async with producer_of(broker, book.check) as producer:
        with closing(book.connect()) as connection:
            match = "still in a transaction" if still_open else "rolled back"
            with pytest.raises(TransactionNotCommittedError, match=match) as caught:
                async with producer.transaction(MESSAGE) as tx:
                    save(tx.id)
            assert caught.value.still_open is still_open
            again = pickle.loads(pickle.dumps(caught.value))
            assert (again.transaction_id, str(again)) == (tx.id, str(caught.value))
            assert not any(tx._recordings)
            connection.rollback()
        assert await settled(broker) == set()


@on_both_loops
async def test_a_checker_of_another_database_is_an_error_that_says_so(
    broker: FakeBroker, book: OrderBook
) -> None:
    """Each connection to ``:memory:`` is one of its own."""
    checker = book.ledger.checker(lambda: sqlite3.connect(":memory:"))
    async with producer_of(broker, checker) as producer:
        with pytest.raises(ConfigurationError, match=r"no table halfmq_transactions.*:memory:"):
            async with producer.transaction(MESSAGE) as tx:
                book.save(tx.id)

    assert broker.half_of(tx.id).decisions == []


@on_both_loops
@pytest.mark.parametrize("commits", [True, False])
async def test_a_listeners_commit_needs_the_row_too(
    broker: FakeBroker, book: OrderBook, commits: bool
) -> None:
    """With the checker of a ledger; of several messages, the row decides about all."""

    class Local(TransactionListener):
        def execute_local_transaction(self, transaction: Transaction, _arg: object) -> Decision:
            with closing(book.connect()) as connection:
                book.ledger.record(connection, transaction.id)
                if commits:
                    connection.commit()
            return Decision.COMMIT

        def check_local_transaction(self, _message: MessageView) -> Decision:
            raise AssertionError

    async with producer_of(broker, book.check) as producer:
        sent = producer.send_in_transaction([MESSAGE, MESSAGE], Local())
        if commits:
            assert (await sent).decided
        else:
            with pytest.raises(TransactionNotCommittedError):
                await sent
        await settled(broker)

    assert len(broker.messages("orders")) == (2 if commits else 0)


def test_an_error_that_is_kept_locks_nothing(book: OrderBook) -> None:
    """It holds the frames of its raise, which held the ledger's cursor."""
    book.save("t-1")
    connection = book.connect()
    with pytest.raises(TransactionFencedError) as kept:
        book.ledger.record(connection, "t-1")
    connection.close()

    with closing(sqlite3.connect(book.path, timeout=0)) as another, another:
        another.execute("insert into orders values ('o-1')")
    assert kept.value.transaction_id == "t-1"


# -- without await


@pytest.fixture
def served() -> Iterator[BrokerThread]:
    thread = BrokerThread()
    yield thread
    thread.close()


@pytest.fixture
def signalled() -> Iterator[Callable[[], None]]:
    """Sends the main thread a signal, whose handler raises."""
    taken = threading.Event()

    def handler(_number: int, _frame: object) -> None:
        if not taken.is_set():
            taken.set()
            raise InterruptionError

    before = signal.signal(signal.SIGUSR1, handler)
    main = threading.main_thread().ident
    assert main is not None

    def send() -> None:
        # Again, should it come just before the main thread begins to wait, which it does not end.
        while not taken.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)
            taken.wait(0.05)

    yield send
    signal.signal(signal.SIGUSR1, before)


def blocking_producer(
    served: BrokerThread, checker: Callable[[MessageView], Decision]
) -> blocking.TransactionProducer:
    address = served.broker.address
    return blocking.TransactionProducer("orders-tx", checker, namesrv=address, config=QUICK)


def block(producer: blocking.TransactionProducer, book: OrderBook) -> None:
    with producer.transaction(MESSAGE) as tx:
        book.save(tx.id)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, InterruptionError])
def test_row_and_message_agree_wherever_a_blocking_block_is_interrupted(
    served: BrokerThread, book: OrderBook, error: Callable[[], BaseException]
) -> None:
    """A signal handler may raise at any call of the block, its entry and its exit."""
    delivered: set[str] = set()
    broker = served.broker
    with blocking_producer(served, book.check) as producer:
        for number in range(1, CALLS_MAX):
            with (
                contextlib.suppress(KeyboardInterrupt, InterruptionError),
                raising_at_call(number, error) as places,
            ):
                block(producer, book)
            served.run(deliver(broker, delivered))
            assert delivered == book.saved, places
            if not places:
                break

    assert not places
    assert number > 30
    assert len(broker.halves) > len(delivered) > 1


async def deliver(broker: FakeBroker, delivered: set[str]) -> None:
    delivered |= await settled(broker)


def test_a_second_signal_while_the_checker_is_asked_leaves_it_to_the_broker(
    served: BrokerThread, book: OrderBook, signalled: Callable[[], None]
) -> None:
    """The program does not wait, and the next check reaches the checker."""
    release = threading.Event()
    asked: list[MessageView] = []

    def check(message: MessageView) -> Decision:
        asked.append(message)
        if len(asked) == 1:
            signalled()
            release.wait(60)
        return book.check(message)

    def save(tx_id: str) -> None:
        book.save(tx_id)
        raise KeyboardInterrupt

    with blocking_producer(served, check) as producer:
        entered = producer.transaction(MESSAGE)
        with pytest.raises(InterruptionError) as caught, entered as tx:
            save(tx.id)
        assert isinstance(caught.value.__context__, KeyboardInterrupt)
        half = served.broker.half_of(tx.id)
        release.set()
        served.run(until(lambda: served.broker.check(half) and half.decisions == [COMMIT]))

    assert len(asked) >= 2


def test_interrupted_while_the_half_message_is_stored_it_is_rolled_back(
    served: BrokerThread, book: OrderBook, signalled: Callable[[], None]
) -> None:
    """Its block never runs, so the checker is not called."""
    broker = served.broker
    prepare = broker.handlers[RequestCode.SEND_MESSAGE_V2]

    def interrupt(command: RemotingCommand, peer: Peer) -> bytes | None:
        signalled()
        return prepare(command, peer)

    broker.handlers[RequestCode.SEND_MESSAGE_V2] = interrupt
    with blocking_producer(served, book.check) as producer:
        with pytest.raises(InterruptionError), producer.transaction(MESSAGE):
            raise AssertionError("the block must not run")
        served.run(until(lambda: [h.decisions for h in broker.halves.values()] == [[ROLLBACK]]))


def test_interrupted_while_the_commit_is_sent_it_stays_a_commit(
    served: BrokerThread, book: OrderBook, signalled: Callable[[], None]
) -> None:
    """A decision does not change after it was made."""
    broker = served.broker
    end = broker.handlers[RequestCode.END_TRANSACTION]

    def interrupt(command: RemotingCommand, peer: Peer) -> bytes | None:
        signalled()
        return end(command, peer)

    broker.handlers[RequestCode.END_TRANSACTION] = interrupt
    with blocking_producer(served, book.check) as producer, pytest.raises(InterruptionError):
        block(producer, book)

    assert [half.decisions for half in broker.halves.values()] == [[COMMIT]]


def test_a_blocking_block_that_records_nothing_is_an_error(
    served: BrokerThread, book: OrderBook
) -> None:
    """The blocking client behaves as the async one."""
    with (
        blocking_producer(served, book.check) as producer,
        pytest.raises(TransactionNotRecordedError),
        producer.transaction(MESSAGE) as tx,
    ):
        pass

    assert served.broker.half_of(tx.id).decisions == []


def test_a_blocking_context_is_entered_once(served: BrokerThread, book: OrderBook) -> None:
    """A second entry raises and does not affect the first."""
    with blocking_producer(served, book.check) as producer:
        context = producer.transaction(MESSAGE)
        with context as tx:
            with pytest.raises(ClientError, match="entered only once"), context:
                pass
            book.save(tx.id)

    assert served.broker.half_of(tx.id).decisions == [COMMIT]


def test_a_generator_that_nobody_finishes_waits_for_nothing(
    served: BrokerThread, book: OrderBook
) -> None:
    """It may be closed on the background thread itself; the broker will check."""

    def saved(producer: blocking.TransactionProducer) -> Iterator[str]:
        with producer.transaction(MESSAGE) as tx:
            book.save(tx.id)
            yield tx.id

    with blocking_producer(served, book.check) as producer:
        generator = saved(producer)
        half = served.broker.half_of(next(generator))
        generator.close()  # type: ignore[attr-defined] # an iterator here, a generator in truth
        assert half.decisions == []
        served.run(until(lambda: served.broker.check(half) and half.decisions == [COMMIT]))
