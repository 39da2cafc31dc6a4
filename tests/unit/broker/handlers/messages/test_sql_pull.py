"""Pulls with an SQL92 filter: what is delivered, what is refused, and what it costs the loop."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest

from halfmq.broker.errors import FilterSyntaxError, NotYetError, RequestRefusedError
from halfmq.broker.filters import filters_in_use
from halfmq.broker.filters.expressions import OPERATORS_MAX
from halfmq.broker.handlers.messages import sql_search
from halfmq.broker.limits.kept import FILTER_BYTES
from halfmq.remoting.bodies import (
    ConsumerData,
    HeartbeatData,
    encode_heartbeat,
    encode_subscription_check,
    subscription_data,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import PullMessageRequestHeader
from halfmq.store.format.properties import encode_properties
from halfmq.store.format.record import Range, decode_records
from halfmq.store.log.log_reader import LogReader
from tests.support.broker_doubles import FakeConnection
from tests.support.patience import PATIENCE_S
from tests.support.peers import Peer
from tests.support.race_windows import Rig, windowed
from tests.support.seeds import run_seed
from tests.support.stores import draft
from tests.support.usual_headers import pull_header

SQL92 = "SQL92"
EVERY_THIRD = "kind = 'c' AND number >= 0"


@pytest.fixture(autouse=True)
def patient_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search ends because there is nothing more, not because the machine is busy."""
    monkeypatch.setattr(sql_search, "SEARCH_S", PATIENCE_S)


@pytest.fixture(autouse=True)
def messages_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of the loop find every message: a busy system may hold a fresh page back for a moment.

    Such a message is read by a thread, and a held pull answered without it: see
    `test_messages_on_disk_are_read_by_a_thread`.
    """

    def read(reader: LogReader, ranges: Sequence[Range], *, prefix: bytes = b"") -> bytes:
        return prefix + reader.read_cold(ranges)

    monkeypatch.setattr(LogReader, "read", read)


def pulling(
    offset: int,
    expression: str | None = EVERY_THIRD,
    *,
    kind: str = SQL92,
    suspend_ms: int = 0,
    version: int = 0,
    flags: int = 4,
) -> PullMessageRequestHeader:
    """Ask for messages from an offset on; by an expression, or by what the heartbeat said."""
    return pull_header(
        queue_offset=offset,
        sys_flag=flags | 2 * bool(suspend_ms),
        suspend_timeout_millis=suspend_ms,
        subscription=expression,
        sub_version=version,
        expression_type=kind,
    )


def stored(rig: Rig, count: int, start: int = 0) -> None:
    """Store messages of kinds a, b, c in turn; their bodies are their numbers."""
    rig.store.append(
        [
            draft(
                "orders",
                0,
                b"%d" % number,
                properties=encode_properties({"number": str(number), "kind": "abc"[number % 3]}),
            )
            for number in range(start, start + count)
        ]
    )


async def consumer_of(rig: Rig) -> Peer:
    """A consumer; the topic is there."""
    consumer = await rig.peer()
    await consumer.prepare("0" * 32)
    return consumer


async def pulled(rig: Rig, consumer: Peer, header: PullMessageRequestHeader) -> RemotingCommand:
    opaque = consumer.send(RequestCode.PULL_MESSAGE, header)
    return await rig.patiently(consumer.answer(opaque))


async def all_pulled(rig: Rig, consumer: Peer, expression: str = EVERY_THIRD) -> list[bytes]:
    """Pull until there is nothing more; return the bodies."""
    offset = 0
    bodies: list[bytes] = []
    while True:
        answer = await pulled(rig, consumer, pulling(offset, expression))
        if answer.code == ResponseCode.PULL_NOT_FOUND:
            return bodies
        assert next_of(answer) > offset
        offset = next_of(answer)
        bodies += [record.body for record in decode_records(answer.body)]
        assert (answer.code == ResponseCode.SUCCESS) == bool(answer.body)


def next_of(answer: RemotingCommand) -> int:
    assert isinstance(answer.header, dict)
    return int(answer.header["nextBeginOffset"])


@windowed()
async def test_a_pull_gets_all_matching_messages(rig: Rig) -> None:
    """In order, and none twice, from the beginning of a queue to its end."""
    consumer = await consumer_of(rig)
    stored(rig, 1_000)
    await rig.wait(1_000)

    bodies = await all_pulled(rig, consumer)

    assert bodies == [b"%d" % number for number in range(2, 1_000, 3)]


@windowed()
async def test_random_queues_are_filtered_exactly(rig: Rig) -> None:
    """Messages of other queues between them, large ones, some without properties."""
    seed = run_seed()
    print(f"seed {seed}")
    rng = random.Random(seed)
    consumer = await consumer_of(rig)
    wanted = []
    for number in range(400):
        has_property, body = rng.random() < 0.3, b"%d-" % number + b"x" * rng.choice([0, 9, 9_000])
        properties = {"wanted": "yes", "n": str(number)} if has_property else {}
        rig.store.append(
            [
                draft("orders", 1, b"another queue"),
                draft("orders", 0, body, properties=encode_properties(properties)),
            ]
        )
        if has_property:
            wanted.append(body)
    await rig.wait(1_000)

    assert await all_pulled(rig, consumer, "wanted = 'yes'") == wanted


@windowed()
async def test_a_search_that_matches_nothing_ends_in_time(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pull is answered, and the next one continues where it ended."""
    monkeypatch.setattr(sql_search, "SEARCH_S", 0.0)  # the time is over after each message
    consumer = await consumer_of(rig)
    stored(rig, 5)
    await rig.wait(1_000)

    answers = [await pulled(rig, consumer, pulling(offset)) for offset in range(5)]

    assert [answer.code for answer in answers] == [
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.SUCCESS,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
    ]
    assert [next_of(answer) for answer in answers] == [1, 2, 3, 4, 5]


@windowed()
async def test_a_held_pull_is_answered_by_a_message_that_matches(rig: Rig) -> None:
    """Other messages do not wake it, and it does not read them again."""
    consumer = await consumer_of(rig)
    opaque = consumer.send(RequestCode.PULL_MESSAGE, pulling(0, suspend_ms=15_000))
    await rig.settle()
    stored(rig, 2)
    await rig.wait(1_000)
    stored(rig, 1, start=2)
    await rig.wait(1_000)

    answer = await rig.patiently(consumer.answer(opaque))

    assert [record.body for record in decode_records(answer.body)] == [b"2"]
    assert next_of(answer) == 3


@windowed()
async def test_a_held_pull_that_times_out_continues_after_the_searched_messages(rig: Rig) -> None:
    """Otherwise each pull of a filter that matches nothing would search the same messages."""
    consumer = await consumer_of(rig)
    opaque = consumer.send(RequestCode.PULL_MESSAGE, pulling(0, suspend_ms=2_000))
    await rig.settle()
    stored(rig, 2)
    await rig.wait(5_000)

    answer = await rig.patiently(consumer.answer(opaque))

    assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
    assert next_of(answer) == 2


@windowed()
async def test_messages_on_disk_are_read_by_a_thread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop goes on meanwhile, and the answer is the same."""
    consumer = await consumer_of(rig)
    stored(rig, 100)
    await rig.wait(1_000)
    readers = []
    read_cold = LogReader.read_cold

    def reading(reader: LogReader, *arguments: object, **more: object) -> bytes:
        readers.append(threading.get_ident())
        return read_cold(reader, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(LogReader, "read", lambda *_, **__: None)
    monkeypatch.setattr(LogReader, "read_cold", reading)

    assert await all_pulled(rig, consumer) == [b"%d" % number for number in range(2, 100, 3)]
    assert threading.get_ident() not in readers


@windowed()
async def test_a_damaged_record_is_delivered_as_it_is(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer reports it; the other messages are filtered."""
    consumer = await consumer_of(rig)
    stored(rig, 9)
    await rig.wait(1_000)
    answer = await pulled(rig, consumer, pulling(0, "number = 4"))
    whole = answer.body
    read = LogReader.read

    def damaged(reader: LogReader, *arguments: object, **more: object) -> bytes | None:
        content = read(reader, *arguments, **more)  # type: ignore[arg-type]
        broken = whole[:4] + b"\0\0\0\0" + whole[8:]
        return None if content is None else content.replace(whole, broken)

    monkeypatch.setattr(LogReader, "read", damaged)
    parts = []
    offset = 0
    while offset < 9:
        answer = await pulled(rig, consumer, pulling(offset))
        parts.append(answer.body)
        offset = next_of(answer)

    assert len(b"".join(parts)) == 4 * len(whole)  # 2, the damaged 4, 5 and 8
    assert sum(part[4:8] == b"\0\0\0\0" for part in parts) == 1


@windowed()
async def test_the_filter_of_a_heartbeat_is_used(rig: Rig) -> None:
    """As official push consumers pull; an older or a wrong filter is refused, with the reason."""
    consumer = await consumer_of(rig)
    stored(rig, 9)
    await rig.wait(1_000)

    async def beat(expression: str, version: int) -> None:
        data = subscription_data("orders", expression, SQL92, version)
        group = ConsumerData(group_name="cg", subscription_data_set=(data,))
        heartbeat = HeartbeatData(client_id="c", consumer_data_set=(group,))
        opaque = consumer.send(RequestCode.HEART_BEAT, None, encode_heartbeat(heartbeat))
        await rig.patiently(consumer.answer(opaque))

    await beat("kind = 'b'", 1)
    found = await pulled(rig, consumer, pulling(0, None, version=1, flags=0))
    older = await pulled(rig, consumer, pulling(0, None, version=2, flags=0))
    await beat("kind == 'b'", 2)
    wrong = await pulled(rig, consumer, pulling(0, None, version=2, flags=0))

    assert [record.body for record in decode_records(found.body)] == [b"1", b"4", b"7"]
    assert older.code == ResponseCode.SUBSCRIPTION_NOT_LATEST
    assert wrong.code == ResponseCode.FILTER_DATA_NOT_EXIST
    assert wrong.remark == "SQL92 filter is wrong at character 7: write = for equality"


@windowed()
async def test_an_invalid_filter_is_refused(rig: Rig) -> None:
    """A wrong or too long expression, another language, and classes."""
    consumer = await consumer_of(rig)

    async def refusal(header: PullMessageRequestHeader) -> tuple[int, str | None]:
        answer = await pulled(rig, consumer, header)
        return answer.code, answer.remark

    async def check(expression: str) -> tuple[int, str | None]:
        data = subscription_data("orders", expression, SQL92)
        body = encode_subscription_check("c", "cg", data)
        opaque = consumer.send(RequestCode.CHECK_CLIENT_CONFIG, None, body)
        answer = await rig.patiently(consumer.answer(opaque))
        return answer.code, answer.remark

    wrong = (
        ResponseCode.SUBSCRIPTION_PARSE_FAILED,
        (
            "SQL92 filter is wrong at character 3: LIKE is not supported; "
            "use CONTAINS, STARTSWITH or ENDSWITH"
        ),
    )
    assert await refusal(pulling(0, "a LIKE 'x'")) == wrong
    assert await check("a LIKE 'x'") == wrong
    assert await check("a = 5") == (ResponseCode.SUCCESS, None)
    huge = "a = 1" + " OR a = 1" * 20_000
    code, remark = await check(huge)
    assert code == ResponseCode.SYSTEM_ERROR
    assert remark == f"a filter has {len(huge)} characters, the limit is 65536"
    code, remark = await check("a = 1" + " OR a = 1" * OPERATORS_MAX)
    assert code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    unsupported = "The broker does not support consumer to filter message by "
    assert await refusal(pulling(0, "a", kind="JS")) == (1, f"{unsupported}JS")
    assert await refusal(pulling(0, "*", kind="TAG", flags=4 | 8)) == (
        1,
        f"{unsupported}class, only by SQL92",
    )


PATHOLOGICAL = (
    "-" * 60_000 + "a",
    "a = 1" + " OR a = 1" * 7_000,
    "a IN (" + "'x'," * 15_000 + "'x')",
    "1" * 60_000 + " = a",
    "a CONTAINS '" + "x" * 60_000 + "'",
    "x" * 65_537,
)


@windowed()
async def test_no_expression_stops_the_broker(rig: Rig) -> None:
    """Garbage and the largest expressions are answered, and a valid filter works afterwards."""
    seed = run_seed()
    print(f"seed {seed}")
    rng = random.Random(seed)
    consumer = await consumer_of(rig)
    stored(rig, 9)
    await rig.wait(1_000)
    words = "number kind = <> > ( ) 'c' 5 1.5 NOT AND OR IN IS NULL BETWEEN CONTAINS , - é \x00"
    garbage = (" ".join(rng.choices(words.split(" "), k=rng.randrange(12))) for _ in range(100))

    for expression in (*PATHOLOGICAL, *garbage):
        answer = await pulled(rig, consumer, pulling(0, expression or " "))
        assert answer.code in {
            ResponseCode.SUCCESS,
            ResponseCode.PULL_RETRY_IMMEDIATELY,
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
        }
        assert len(answer.remark or "") < 200

    assert len(await all_pulled(rig, consumer)) == 3


def test_filters_can_be_switched_off() -> None:
    """As RocketMQ has it by default, with its remark."""
    with pytest.raises(RequestRefusedError) as caught:
        filters_in_use.FiltersInUse(enabled=False).compiled(
            SQL92, "TRUE", ResponseCode.SUBSCRIPTION_PARSE_FAILED, FakeConnection()
        )

    assert caught.value.code == ResponseCode.SYSTEM_ERROR
    assert caught.value.remark == "The broker does not support consumer to filter message by SQL92"


@windowed()
async def test_a_filter_is_compiled_once_until_there_are_too_many(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all pulls and groups; the memory of all filters is bounded."""
    compiled: list[str] = []
    compile_ = filters_in_use._compile  # that it is called shows in no answer

    def counted(expression: str) -> object:
        compiled.append(expression)
        return compile_(expression)

    monkeypatch.setattr(filters_in_use, "_compile", counted)
    few = FILTER_BYTES._replace(most=3 * filters_in_use.FILTER_WEIGHT)
    monkeypatch.setattr(filters_in_use, "FILTER_BYTES", few)
    consumer = await consumer_of(rig)

    for expression in ["TRUE", "TRUE", "a", "a", "TRUE", "NULL", "TRUE", "a"]:
        await pulled(rig, consumer, pulling(0, expression))

    assert compiled == ["TRUE", "a", "NULL", "a"]


def test_connections_take_turns_with_new_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for all filters of another one, and many cannot keep out others."""
    compiled: list[str] = []
    refused: list[str] = []

    def compile_(expression: str) -> object:
        compiled.append(expression)
        raise FilterSyntaxError(0, expression)

    async def main() -> None:
        filters = filters_in_use.FiltersInUse()
        answered = asyncio.Semaphore(0)

        def ask(expression: str, connection: FakeConnection) -> None:
            def answer(refusal: RequestRefusedError | None) -> None:
                assert refusal is not None
                refused.extend([expression] if refusal.code == ResponseCode.SYSTEM_BUSY else [])
                answered.release()

            with pytest.raises(NotYetError) as caught:
                filters.compiled(SQL92, expression, ResponseCode.SYSTEM_ERROR, connection)
            caught.value.wait(answer, 0)

        many = [FakeConnection(f"127.0.0.1:{1 + number}") for number in range(3)]
        for number in range(5):
            for connection in many:
                ask(f"{connection.name} {number}", connection)
        ask("one", FakeConnection("127.0.0.1:9"))
        for _ in range(16):
            await answered.acquire()
        await filters.stop()

    monkeypatch.setattr(filters_in_use, "_compile", compile_)
    monkeypatch.setattr(filters_in_use, "WAITING_MAX", 8)
    monkeypatch.setattr(filters_in_use, "WAITING_MAX_OF_ONE", 4)
    asyncio.run(main())

    assert "one" in compiled[:5]
    assert sorted(compiled + refused) == sorted({*compiled, *refused})
    assert len(refused) == 16 - 9  # one was being compiled
    assert {expression[:11] for expression in compiled} == {f"127.0.0.1:{n}" for n in (1, 2, 3)} | {
        "one"
    }


def test_a_broker_without_filters_does_not_load_the_parser() -> None:
    """It would cost every broker 50 ms of its start and 3 MB."""
    program = "import sys, halfmq.broker.service; sys.exit('lark' in sys.modules)"

    subprocess.run([sys.executable, "-c", program], check=True)
