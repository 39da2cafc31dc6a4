"""Several messages in one transaction, and messages delivered some time after their commit."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from halfmq.client import (
    BrokerRefusedError,
    ConfigurationError,
    Decision,
    InvalidMessageError,
    Message,
    MessageTooLargeError,
    MessageView,
    SendTimeoutError,
    Transaction,
    TransactionListener,
)
from halfmq.client.config import HeaderChoice
from halfmq.client.message import MessageQueue
from halfmq.client.net.routes import Route
from halfmq.client.transactional.multi_message_prepare import choose_queues
from halfmq.remoting.codes import RequestCode, ResponseCode
from tests.support.client_loops import in_steady_time, on_both_loops
from tests.support.client_transactions import (
    COMMIT,
    IMPATIENT,
    MESSAGE,
    QUICK,
    ROLLBACK,
    SEND,
    new_producer,
)
from tests.support.fake_broker import Answer, Cut, FakeBroker, Ignore, Refuse, fake_broker, until

PREPARE = RequestCode.PREPARE_TRANSACTION
SEVERAL = [
    Message("orders", b"o-7", keys="o-7"),
    Message("invoices", b"i-7", tags="new"),
    Message("orders", b"o-7 again", properties={"a": "b"}),
]


@on_both_loops
async def test_several_messages_are_delivered_all_or_none(broker: FakeBroker) -> None:
    """One request prepares them, one decision delivers them, to several topics."""
    async with new_producer(broker) as producer:
        async with producer.transaction(SEVERAL) as committed:
            assert broker.messages("orders") == broker.messages("invoices") == []
        async with producer.transaction(SEVERAL) as rolled_back:
            rolled_back.rollback()

    orders, invoices = broker.messages("orders"), broker.messages("invoices")
    assert [record.body for record in orders] == [b"o-7", b"o-7 again"]
    assert [record.body for record in invoices] == [b"i-7"]
    assert (len(broker.requests_of(PREPARE)), broker.requests_of(SEND)) == (2, [])
    assert (committed.decided, rolled_back.decided) == (True, True)
    assert committed.final_message_id == orders[0].msg_id
    assert committed.message is SEVERAL[0]
    assert committed.id == orders[0].property_map["UNIQ_KEY"]
    views = [MessageView(record, "broker-a") for record in (orders[0], invoices[0], orders[1])]
    assert [view.half_message_id for view in views] == [
        result.offset_message_id for result in committed.results
    ]
    assert [view.message_id for view in views] == [r.message_id for r in committed.results]
    assert [view.queue for view in views] == [result.queue for result in committed.results]
    assert {result.transaction_id for result in committed.results} == {committed.id}


@on_both_loops
async def test_a_list_of_one_is_a_single_message(broker: FakeBroker) -> None:
    """It also works with an official broker."""
    async with new_producer(broker) as producer, producer.transaction([MESSAGE]) as tx:
        assert (tx.message, tx.result) == (MESSAGE, tx.results[0])

    assert (broker.requests_of(PREPARE), len(broker.requests_of(SEND))) == ([], 1)
    assert len(broker.messages("orders")) == 1


async def test_the_checker_sees_the_first_message() -> None:
    """The first message identifies the transaction."""
    asked: list[MessageView] = []

    async def checker(message: MessageView) -> Decision:
        asked.append(message)
        return Decision.COMMIT

    async with fake_broker() as broker, new_producer(broker, checker) as producer:
        async with producer.transaction(SEVERAL) as tx:
            tx.decide(Decision.UNKNOWN)
        broker.check(broker.half_of(tx.id))
        await until(lambda: len(broker.messages("orders")) == 2)

    (message,) = asked
    assert (message.transaction_id, message.keys) == (tx.id, "o-7")
    assert len(broker.messages("invoices")) == 1


@on_both_loops
async def test_a_lost_answer_prepares_nothing_twice(broker: FakeBroker) -> None:
    """The retry has the same ids."""
    broker.fail(PREPARE, Refuse(ResponseCode.SYSTEM_BUSY), Cut(after_doing=True))
    async with new_producer(broker) as producer, producer.transaction(SEVERAL):
        pass

    assert len(broker.requests_of(PREPARE)) == 3
    assert len(broker.halves) == 3
    assert len(broker.messages("orders")) == 2


@in_steady_time
async def test_what_is_never_answered_is_rolled_back_by_its_check() -> None:
    """Its block will not run, whether the half messages are stored or not."""
    async with fake_broker() as broker, new_producer(broker, config=IMPATIENT) as producer:
        broker.fail(PREPARE, *[Ignore(after_doing=True)] * 9)
        with pytest.raises(SendTimeoutError):
            await producer.transaction(SEVERAL).__aenter__()
        leader = next(iter(broker.halves.values()))
        await until(lambda: broker.check(leader) and bool(leader.decisions))

    assert leader.decisions[0] == ROLLBACK


async def test_a_refusal_is_the_callers() -> None:
    """The block does not run."""
    async with fake_broker() as broker, new_producer(broker) as producer:
        broker.fail(PREPARE, Refuse(ResponseCode.MESSAGE_ILLEGAL))
        with pytest.raises(BrokerRefusedError, match="MESSAGE_ILLEGAL"):
            await producer.transaction(SEVERAL).__aenter__()
        for nonsense in (b"\x91\x93\x00\x00\xa1x", b"?"):
            broker.fail(PREPARE, Answer(nonsense))
            with pytest.raises(Exception, match="breaks the protocol"):
                await producer.transaction(SEVERAL).__aenter__()
        # Memory that only grows shows in nothing else.
        assert producer._open == {}


@pytest.mark.parametrize("header_type", ["json", "msgpack"])
async def test_it_needs_no_particular_header(header_type: HeaderChoice) -> None:
    """Several messages work with JSON and with MSGPACK headers."""
    config = replace(QUICK, header_type=header_type)
    async with fake_broker() as broker, new_producer(broker, config=config) as producer:
        async with producer.transaction(SEVERAL) as tx:
            pass
        assert tx.decided

    assert len(broker.messages("orders")) == 2


async def test_an_official_broker_cannot_do_it() -> None:
    """The error says that several messages and delays after the commit need halfmq."""
    async with fake_broker(halfmq=False) as broker, new_producer(broker) as producer:
        with pytest.raises(ConfigurationError, match="only halfmq brokers take several"):
            await producer.transaction(SEVERAL).__aenter__()
        late = Message("orders", b"x", deliver_after=timedelta(seconds=1))
        with pytest.raises(ConfigurationError, match="only halfmq brokers delay"):
            await producer.transaction(late).__aenter__()
        async with producer.transaction([MESSAGE]):
            pass

    assert len(broker.messages("orders")) == 1


class Commits(TransactionListener):
    """A listener whose local transaction always works."""

    def execute_local_transaction(self, transaction: Transaction, arg: object) -> Decision:
        assert len(transaction.messages) == 3
        return Decision.COMMIT

    def check_local_transaction(self, message: MessageView) -> Decision:
        raise AssertionError


async def test_a_listener_may_decide_about_several() -> None:
    """``send_in_transaction`` also accepts a list."""
    async with fake_broker() as broker, new_producer(broker, None) as producer:
        tx = await producer.send_in_transaction(SEVERAL, Commits())

    assert tx.decided
    assert broker.half_of(tx.id).decisions == [COMMIT]


@pytest.mark.parametrize("count", [0, 65])
async def test_the_number_of_messages_is_limited(count: int) -> None:
    """The error comes before anything is sent."""
    async with fake_broker() as broker, new_producer(broker) as producer:
        with pytest.raises(InvalidMessageError, match=f"{count} messages"):
            producer.transaction([MESSAGE] * count)


@pytest.mark.parametrize("wrong", ["abc", [MESSAGE, 5], None, {"a": MESSAGE}])
async def test_what_is_no_message_is_refused_by_name(wrong: Any) -> None:
    """A program without type checks gets a clear error, not an AttributeError."""
    async with fake_broker() as broker, new_producer(broker) as producer:
        with pytest.raises(InvalidMessageError, match="neither a Message nor a list of them"):
            producer.transaction(wrong)


async def test_together_they_fit_into_a_frame() -> None:
    """A broker closes the connection after a longer frame."""
    large = Message("orders", bytes(4_000_000))
    config = replace(QUICK, compress_over=None)
    async with (
        fake_broker() as broker,
        new_producer(broker, config=config) as producer,
    ):
        with pytest.raises(MessageTooLargeError, match="transaction of 2"):
            await producer.transaction([large] * 5).__aenter__()
        assert broker.halves == {}


def _route(topic: str, *brokers: str) -> Route:
    queues = tuple(MessageQueue(topic, name, n) for name in brokers for n in range(2))
    return Route(topic, queues, queues, dict.fromkeys(brokers, "127.0.0.1:1"))


def test_all_messages_go_to_one_broker() -> None:
    """It serves all the topics, and after a failure another one is preferred."""
    orders, invoices = _route("orders", "a", "b", "c"), _route("invoices", "c", "b")
    for avoided in (None, "a", "b", "c"):
        for _ in range(7):
            queues = choose_queues([orders, invoices, orders], [None] * 3, avoided)
            assert [queue.topic for queue in queues] == ["orders", "invoices", "orders"]
            assert len({queue.broker_name for queue in queues}) == 1
            assert queues[0].broker_name in {"b", "c"} - {avoided}
    assert choose_queues([_route("x", "a")], [None], "a")[0].broker_name == "a"
    with pytest.raises(ConfigurationError, match="invoices"):
        choose_queues([_route("orders", "a"), invoices], [None] * 2)


def test_an_order_key_has_its_queue_also_beside_others() -> None:
    """The queue of a key decides about the broker; keys of two brokers cannot be in one."""
    orders, invoices = _route("orders", "a", "b"), _route("invoices", "a", "b")
    by_broker = {orders.queue_of(key).broker_name: key for key in map(str, range(20))}
    for broker_name, key in by_broker.items():
        for _ in range(3):
            queues = choose_queues([invoices, orders, invoices], [None, key, key], broker_name)
            assert queues[1:] == [orders.queue_of(key), invoices.queue_of(key)]
            assert queues[0].broker_name == broker_name
    with pytest.raises(ConfigurationError, match="order keys"):
        choose_queues([orders, invoices], [by_broker["a"], by_broker["b"]])


@on_both_loops
async def test_messages_of_one_order_key_come_in_the_order_of_their_commits(
    broker: FakeBroker,
) -> None:
    """In one queue, in transactions with one message or several, and with a listener."""

    class Commits(TransactionListener):
        def execute_local_transaction(self, _transaction: Transaction, _arg: object) -> Decision:
            return Decision.COMMIT

        def check_local_transaction(self, _message: MessageView) -> Decision:
            raise AssertionError

    listener = Commits()
    broker.create_topic("orders", 8)
    async with new_producer(broker) as producer:
        plain = await producer.send(Message("orders", b"plain"), order_key="c-1")
        for n in range(3):
            one = producer.transaction(Message("orders", b"%d" % n), order_key="c-1")
            another = producer.transaction(Message("orders", b"later %d" % n), order_key="c-1")
            both = [Message("orders", b"%d %d" % (n, m)) for m in range(2)]
            async with another:  # prepared first, committed last
                async with one:
                    pass
                async with producer.transaction(both, order_key=[None, "c-1"]):
                    pass
                await producer.send_in_transaction(
                    Message("orders", b"listened %d" % n), listener, order_key="c-1"
                )

    queue = [m.body for m in broker.messages("orders") if m.queue_id == plain.queue.queue_id]
    wanted = [b"plain"]
    for n in range(3):
        wanted += [b"%d" % n, b"%d 1" % n, b"listened %d" % n, b"later %d" % n]
    assert [body for body in queue if not body.endswith(b" 0") or len(body) > 3] == wanted


@pytest.mark.parametrize("wrong", [b"c-1", 7, ["c-1"], ["c-1", b"c-2"], {"c-1": 1}])
async def test_what_is_no_order_key_is_refused_by_name(wrong: Any) -> None:
    async with fake_broker() as broker, new_producer(broker) as producer:
        with pytest.raises(ConfigurationError, match="order_key"):
            producer.transaction([MESSAGE, MESSAGE], order_key=wrong)


@on_both_loops
async def test_a_delay_from_the_commit_on_is_a_property(broker: FakeBroker) -> None:
    """It is in milliseconds and never early; a time is independent of the time zone."""
    noon = datetime(2030, 1, 1, 12, 0, 0, 1, tzinfo=UTC)
    messages = [
        Message("orders", b"x", deliver_after=timedelta(milliseconds=1, microseconds=1)),
        Message("orders", b"x", deliver_at=noon),
        Message("orders", b"x", deliver_at=noon.astimezone(timezone(timedelta(hours=-7)))),
        Message("orders", b"x", deliver_at=datetime(1960, 1, 1, tzinfo=UTC)),
    ]
    async with new_producer(broker) as producer:
        for message in messages:
            async with producer.transaction(message):
                pass

    found = [record.property_map for record in broker.messages("orders")]
    assert [p.get("TRANSACTION_DELAY_MS") for p in found] == ["2", None, None, None]
    at = str(int(noon.timestamp()) * 1000 + 1)
    assert [p.get("TRANSACTION_DELIVER_MS") for p in found] == [None, at, at, "1"]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"deliver_after": timedelta()}, "above 0"),
        ({"deliver_after": 30}, "deliver_after is 30, expected a timedelta"),
        ({"deliver_at": 1.5}, "deliver_at is 1.5, expected a datetime"),
        ({"deliver_after": timedelta(days=40, microseconds=1)}, "40 days"),
        ({"deliver_after": timedelta(1), "deliver_at": datetime.now(UTC)}, "not two"),
        ({"deliver_after": timedelta(1), "delay_level": 3}, "not two"),
        ({"deliver_at": datetime(2030, 1, 1)}, "time zone"),  # noqa: DTZ001 -- that is the fault
    ],
)
def test_a_time_of_delivery_is_one_and_clear(wrong: dict[str, object], reason: str) -> None:
    """Values that a broker would reject or read differently are errors."""
    with pytest.raises(InvalidMessageError, match=reason):
        Message("orders", b"x", **wrong)  # type: ignore[arg-type]


async def test_outside_a_transaction_a_time_of_delivery_is_rocketmqs() -> None:
    """In a batch it is refused: its messages are delivered at once."""
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    after = Message("orders", b"x", deliver_after=timedelta(milliseconds=1, microseconds=1))
    async with fake_broker() as broker, new_producer(broker) as producer:
        for one in (after, Message("orders", b"x", deliver_at=noon)):
            await producer.send(one)
            with pytest.raises(InvalidMessageError, match="batch"):
                await producer.send_batch([one])
    sent = [record.property_map for record in broker.messages("orders")]
    assert [one.get("TIMER_DELAY_MS") for one in sent] == ["2", None]
    assert sent[1]["TIMER_DELIVER_MS"] == str(int(noon.timestamp()) * 1_000)
