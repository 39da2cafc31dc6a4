"""The client: encoding of messages, shares of queues, and the offset to commit."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from halfmq.client import ClientConfig, Message
from halfmq.client.arguments import RESERVED_NAMES, is_tag
from halfmq.client.consuming.assignment import allocate_averagely
from halfmq.client.consuming.in_flight import InFlightWindow
from halfmq.client.message import MessageQueue
from halfmq.client.net.compression import decompress_body
from halfmq.client.net.message_encoding import encode_message, encode_message_batch
from halfmq.store.format.batch import decode_batch
from halfmq.store.format.properties import decode_properties

CONFIG = ClientConfig(compress_over=64)

texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1, max_size=20
)
names = texts.filter(lambda name: name not in RESERVED_NAMES)
messages = st.builds(
    Message,
    st.just("orders"),
    st.binary(min_size=1, max_size=300),
    tags=st.none() | texts.filter(is_tag),
    properties=st.dictionaries(names, texts, max_size=5),
)


@given(messages)
def test_a_reader_gets_back_what_was_given(message: Message) -> None:
    """The broker's and Java's parser read the same values from any text."""
    draft = encode_message(message, "ID", CONFIG)

    expected = {"UNIQ_KEY": "ID", **(message.properties or {})}
    if message.tags:
        expected["TAGS"] = message.tags
    assert decode_properties(draft.properties) == expected
    assert decompress_body(draft.body, draft.sys_flag) == message.body


@given(st.lists(messages, min_size=1, max_size=5))
def test_a_batch_holds_every_message_unchanged(batch: list[Message]) -> None:
    """In order, with bodies and properties."""
    draft = encode_message_batch(batch, [str(n) for n in range(len(batch))], CONFIG)

    units = decode_batch(draft.body)
    assert [unit.body for unit in units] == [message.body for message in batch]
    for unit, message in zip(units, batch, strict=True):
        assert (message.properties or {}).items() <= decode_properties(unit.properties).items()


IDS = st.lists(st.text("abc@1", min_size=1, max_size=4), min_size=1, max_size=9, unique=True)


def official(queues: list[int], clients: list[str], own_id: str) -> list[int]:
    """Allocate as Java's ``AllocateMessageQueueAveragely``."""
    index, mod = clients.index(own_id), len(queues) % len(clients)
    if len(queues) <= len(clients):
        average = 1
    elif mod > 0 and index < mod:
        average = len(queues) // len(clients) + 1
    else:
        average = len(queues) // len(clients)
    start = index * average if mod > 0 and index < mod else index * average + mod
    return [queues[start + i] for i in range(min(average, len(queues) - start))]


@given(count=st.integers(0, 40), clients=IDS)
def test_every_member_computes_what_the_official_client_computes(
    count: int, clients: list[str]
) -> None:
    """A group may have Java clients too; each queue must have one owner."""
    queues = list(range(count))

    for own_id in clients:
        assert allocate_averagely(queues, clients, own_id) == official(
            queues, sorted(clients), own_id
        )


@given(count=st.integers(0, 40), clients=IDS)
def test_every_queue_has_exactly_one_owner(count: int, clients: list[str]) -> None:
    """A queue without an owner is never read, one with two is read twice."""
    queues = list(range(count))

    shares = [allocate_averagely(queues, clients, own_id) for own_id in sorted(clients)]

    assert [queue for share in shares for queue in share] == queues


@given(clients=IDS)
def test_a_stranger_gets_nothing(clients: list[str]) -> None:
    """Until the broker has its heartbeat, a member must not take queues of others."""
    assert allocate_averagely([1, 2, 3], clients, "stranger") == []


QUEUE = MessageQueue("orders", "broker-a", 0)


@given(
    start=st.integers(0, 5),
    steps=st.lists(st.tuples(st.sampled_from(["add", "skip", "acknowledge"]), st.integers(0, 30))),
)
def test_nothing_unfinished_lies_below_the_commit_offset(
    start: int, steps: list[tuple[str, int]]
) -> None:
    """Messages below the committed offset are not delivered again, so all must be finished."""
    window, unfinished, added = InFlightWindow(QUEUE, start, None), set[int](), set[int]()

    for action, number in steps:
        if action == "add" and window.add(number, size=number + 1):
            unfinished.add(number)
            added.add(number)
        elif action == "skip":
            window.skip_to(number)
        elif action == "acknowledge":
            assert (window.acknowledge(number) is not None) == (number in unfinished)
            unfinished.discard(number)

        assert window.commit_offset == min(unfinished, default=window.next_offset)
        assert len(window) == len(unfinished)
        assert window.bytes == sum(offset + 1 for offset in unfinished)
        assert window.span == sum(offset >= window.commit_offset for offset in added)


@given(st.permutations(range(8)))
def test_the_offset_moves_only_over_a_run_without_a_gap(order: list[int]) -> None:
    """Acks may come in any order; the offset stays at the first gap."""
    window = InFlightWindow(QUEUE, 0, None)
    for offset in range(8):
        window.add(offset, size=1)

    for count, offset in enumerate(order, start=1):
        window.acknowledge(offset)
        done = set(order[:count])
        assert window.commit_offset == next((n for n in range(8) if n not in done), 8)


def test_a_lost_queue_keeps_its_commit_offset_and_ignores_acks() -> None:
    """The next owner starts there; a late ack must not skip messages that are not consumed."""
    window = InFlightWindow(QUEUE, 0, None)
    for offset in range(3):
        window.add(offset, size=10)
    window.acknowledge(0)

    assert window.drop() == 20
    assert window.acknowledge(1) is None
    assert window.commit_offset == 1
