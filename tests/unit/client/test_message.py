"""What users build, what leaves for the broker, and what comes back."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import lz4.frame
import pytest
import zstandard

from halfmq.client import (
    ClientConfig,
    ClientError,
    ConfigurationError,
    InvalidMessageError,
    Message,
    MessageQueue,
    MessageTooLargeError,
    MessageView,
    UnreadableBodyError,
)
from halfmq.client.net.compression import DECOMPRESSED_SIZE_MAX, Compression
from halfmq.client.net.message_encoding import (
    encode_half_message,
    encode_message,
    encode_message_batch,
)
from halfmq.store.format.batch import decode_batch
from halfmq.store.format.ids import pack_host
from halfmq.store.format.properties import decode_properties
from halfmq.store.format.record import Record, new_record

CONFIG = ClientConfig()


def record(
    body: bytes = b"x", properties: bytes = b"", topic: str = "orders", **fields: int
) -> Record:
    return new_record(
        topic=topic,
        queue_id=2,
        body=body,
        properties=properties,
        born_timestamp=1_700_000_000_123,
        born_host=pack_host("10.0.0.1", 5),
        store_timestamp=1_700_000_001_000,
        store_host=pack_host("10.0.0.5", 10911),
        physical_offset=1073741950,
        **fields,
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda: Message("", b"x"),
        lambda: Message("a b", b"x"),
        lambda: Message("t" * 128, b"x"),
        lambda: Message("orders", b""),
        lambda: Message("orders", "text"),  # type: ignore[arg-type]
        lambda: Message("orders", b"x", tags=""),
        lambda: Message("orders", b"x", tags=" a"),
        lambda: Message("orders", b"x", tags="a||b"),
        lambda: Message("orders", b"x", tags="a b"),
        lambda: Message("orders", b"x", tags="a,b"),
        lambda: Message("orders", b"x", tags="*"),
        lambda: Message("orders", b"x", tags=7),  # type: ignore[arg-type]
        lambda: Message("orders", b"x", keys=["a b"]),
        lambda: Message("orders", b"x", keys="a\x01b"),
        lambda: Message("orders", b"x", delay_level=19),
        lambda: Message("orders", b"x", properties={"TAGS": "a"}),
        lambda: Message("orders", b"x", properties={"a": ""}),
        lambda: Message("orders", b"x", properties={"a\x02": "b"}),
        lambda: Message("orders", b"x", properties={"a": "b\x02UNIQ_KEY\x01c"}),
        lambda: Message("orders", b"x", properties={"a": "\ud800"}),
    ],
)
def test_a_message_that_cannot_arrive_is_refused_where_it_is_built(
    build: Callable[[], Message],
) -> None:
    """The constructor raises; reserved property names are refused too."""
    with pytest.raises(InvalidMessageError):
        build()


def test_properties_carry_tag_keys_and_id() -> None:
    """Consumers and the key index read them."""
    message = Message("orders", b"x", tags="created", keys=["o-1", "o-2"], properties={"a": "b"})

    draft = encode_message(message, "ID", CONFIG)

    assert decode_properties(draft.properties) == {
        "UNIQ_KEY": "ID",
        "TAGS": "created",
        "KEYS": "o-1 o-2",
        "a": "b",
    }


def test_delay_and_wait_travel_only_when_set() -> None:
    """Without the properties, a broker delivers at once and waits for the disk."""
    message = Message("orders", b"x", delay_level=3, wait_durable=False)

    properties = decode_properties(encode_message(message, "ID", CONFIG).properties)

    assert properties == {"UNIQ_KEY": "ID", "DELAY": "3", "WAIT": "false"}


def test_a_half_message_is_marked_by_properties_and_flag() -> None:
    """TRAN_MSG marks it, and PGROUP names the group that is checked."""
    draft = encode_half_message(Message("orders", b"x"), "ID", "orders-tx", CONFIG)

    assert draft.sys_flag == 0x4
    assert decode_properties(draft.properties) == {
        "UNIQ_KEY": "ID",
        "TRAN_MSG": "true",
        "PGROUP": "orders-tx",
    }


def test_a_half_message_cannot_be_delayed() -> None:
    """RocketMQ would ignore the delay without an error."""
    with pytest.raises(InvalidMessageError, match="delay"):
        encode_half_message(Message("orders", b"x", delay_level=1), "ID", "g", CONFIG)


def test_long_bodies_are_compressed_if_that_helps() -> None:
    """From 4096 bytes on, as official clients do; a body that would not shrink is sent as it is."""
    compressible = encode_message(Message("orders", b"a" * 4096), "ID", CONFIG)
    short = encode_message(Message("orders", b"a" * 4095), "ID", CONFIG)
    noise = bytes(zlib.crc32(bytes([n % 256, n // 256])) % 256 for n in range(5000))
    incompressible = encode_message(Message("orders", zlib.compress(noise) * 2), "ID", CONFIG)
    never = encode_message(Message("orders", b"a" * 9000), "ID", ClientConfig(compress_over=None))

    assert compressible.sys_flag == 1
    assert zlib.decompress(compressible.body) == b"a" * 4096
    assert (short.sys_flag, never.sys_flag) == (0, 0)
    assert len(incompressible.body) <= len(zlib.compress(noise) * 2)


def test_limits_are_exact() -> None:
    """A broker accepts 4 MiB of body and 32 767 bytes of properties, and not one byte more."""
    config = ClientConfig(message_size_max=100, compress_over=None)
    encode_message(Message("orders", b"x" * 100), "ID", config)
    fits = 32_767 - len("UNIQ_KEY1ID1" + "a11")
    encode_message(Message("orders", b"x", properties={"a": "v" * fits}), "ID", CONFIG)

    with pytest.raises(MessageTooLargeError) as body:
        encode_message(Message("orders", b"x" * 101), "ID", config)
    with pytest.raises(MessageTooLargeError) as properties:
        encode_message(Message("orders", b"x", properties={"a": "v" * (fits + 1)}), "ID", CONFIG)

    assert (body.value.what, body.value.size, body.value.size_max) == ("body", 101, 100)
    assert properties.value.size == 32_768


def test_a_batch_gives_each_message_its_own_id() -> None:
    """An id in the request's header would become the id of them all."""
    draft = encode_message_batch(
        [Message("t", b"1"), Message("t", b"2", tags="a")], ["A", "B"], CONFIG
    )

    units = decode_batch(draft.body)
    assert [decode_properties(unit.properties)["UNIQ_KEY"] for unit in units] == ["A", "B"]
    assert "UNIQ_KEY" not in draft.properties
    assert draft.unique_key == "A,B"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [Message("a", b"x"), Message("b", b"x")],
        [Message("a", b"x", delay_level=1)],
        [Message("a", b"x"), Message("a", b"x", wait_durable=False)],
        [Message("a", b"x" * 60), Message("a", b"x" * 60)],
    ],
)
def test_what_no_batch_can_hold_is_refused(messages: list[Message]) -> None:
    """The broker would reject the whole batch."""
    config = ClientConfig(message_size_max=120)
    with pytest.raises(InvalidMessageError):
        encode_message_batch(messages, ["K"] * len(messages), config)


def test_a_received_message_shows_what_was_sent() -> None:
    """Fields of the record under the names users know."""
    properties = b"UNIQ_KEY\x01ID\x02TAGS\x01created\x02KEYS\x01o-1 o-2\x02mine\x01x\x02"
    view = MessageView(record(b"hello", properties, queue_offset=7, flag=9), "broker-a")

    assert (view.topic, view.body, view.tags, view.keys) == (
        "orders",
        b"hello",
        "created",
        "o-1 o-2",
    )
    assert (view.message_id, view.offset_message_id) == ("ID", "0A00000500002A9F000000004000007E")
    assert (view.queue, view.queue_offset) == (MessageQueue("orders", "broker-a", 2), 7)
    assert view.born_timestamp == datetime(2023, 11, 14, 22, 13, 20, 123000, UTC)
    assert view.store_timestamp == datetime(2023, 11, 14, 22, 13, 21, tzinfo=UTC)
    assert (view.delivery_attempt, view.flag, view.transaction_id) == (1, 9, None)
    assert view.properties["mine"] == "x"
    with pytest.raises(TypeError):
        view.properties["mine"] = "y"  # type: ignore[index]


def test_a_message_without_properties_still_has_an_id() -> None:
    """The offset id is used if there is no UNIQ_KEY."""
    view = MessageView(record(), "broker-a")

    assert (view.tags, view.keys) == ("", "")
    assert view.message_id == view.offset_message_id


def test_a_retried_message_shows_its_own_topic_and_attempt() -> None:
    """The retry topic of the group is not shown."""
    properties = b"RETRY_TOPIC\x01orders\x02"
    view = MessageView(record(b"x", properties, "%RETRY%g", reconsume_times=2), "broker-a")

    assert (view.topic, view.delivery_attempt) == ("orders", 3)
    assert view.queue.topic == "%RETRY%g"


def test_a_transactional_message_knows_its_transaction() -> None:
    """It is the id that the producer had as tx.id."""
    view = MessageView(record(b"x", b"TRAN_MSG\x01true\x02UNIQ_KEY\x01ID\x02"), "broker-a")

    assert view.transaction_id == "ID"


def test_a_committed_message_has_a_stable_id() -> None:
    """The id of its half message, from the broker or from a record of RocketMQ."""
    half_id = b"__transactionId__\x01K\x02TRANSACTION_HALF_ID\x01HALF\x02"
    told = MessageView(record(b"x", half_id, "%RETRY%g", reconsume_times=1), "broker-a")
    forged = MessageView(record(b"x", half_id), "broker-a")
    committed = record(b"x", b"TRAN_MSG\x01true\x02", sys_flag=0x8)
    found = MessageView(committed._replace(prepared_transaction_offset=0x77), "broker-a")
    plain = MessageView(record(), "broker-a")
    retried = MessageView(record(b"x", b"TRAN_MSG\x01true\x02", "%RETRY%g"), "broker-a")

    assert told.half_message_id == "HALF"
    assert found.half_message_id == "0A00000500002A9F0000000000000077"
    assert (plain.half_message_id, retried.half_message_id) == (None, None)
    assert forged.half_message_id is None


def test_every_message_has_one_id_for_an_inbox() -> None:
    """Its copies have the same, with a transaction or without, on halfmq or RocketMQ."""

    def inbox_id(body: bytes, properties: bytes = b"", topic: str = "orders", **more: int) -> str:
        linked = more.pop("linked", 0)
        copy = record(body, b"UNIQ_KEY\x01K\x02" + properties, topic, **more)
        return MessageView(copy._replace(prepared_transaction_offset=linked), "broker-a").inbox_id

    sent = inbox_id(b"hello")
    back = b"RETRY_TOPIC\x01orders\x02ORIGIN_MESSAGE_ID\x010A\x02"
    copies = {
        "sent twice": inbox_id(b"hello", queue_offset=8),
        "committed": inbox_id(b"hello", b"TRAN_MSG\x01true\x02", sys_flag=0x8, linked=0x77),
        "retry": inbox_id(b"hello", back, "%RETRY%g", reconsume_times=1),
        "retry of RocketMQ": inbox_id(b"hello", back, "%RETRY%g", reconsume_times=1, sys_flag=0x8),
        "dead letter": inbox_id(b"hello", back, "%DLQ%g", reconsume_times=16),
        "sent again": inbox_id(b"hello", back + b"DELAY\x010\x02"),
        "compressed": inbox_id(zlib.compress(b"hello"), sys_flag=0x1),
    }
    assert copies == dict.fromkeys(copies, sent)
    assert re.fullmatch("[0-9a-f]{32}", sent)

    others = [
        inbox_id(b"hell"),  # one Message object of a Java producer, sent with another body
        inbox_id(b"hello", topic="bills"),  # forwarded with all properties
        inbox_id(b"hello", b"UNIQ_KEY\x01L\x02"),
        inbox_id(b"no zlib", sys_flag=0x1),
        MessageView(record(b"hello"), "broker-a").inbox_id,
    ]
    assert len({sent, *others}) == 6
    retried = MessageView(record(b"hello", b"ORIGIN_MESSAGE_ID\x01AB\x02", "%RETRY%g"), "broker-a")
    assert retried.message_id == "AB"  # without UNIQ_KEY


@pytest.mark.parametrize("sys_flag", [0x001, 0x301])
def test_both_marks_of_zlib_are_unpacked(sys_flag: int) -> None:
    """Old clients leave the compression type open, new ones set it."""
    view = MessageView(record(zlib.compress(b"hello" * 1000), sys_flag=sys_flag), "broker-a")

    assert view.body == b"hello" * 1000


@pytest.mark.parametrize(
    ("body", "sys_flag"),
    [
        (b"no zlib", 0x1),
        (zlib.compress(b"hello" * 100)[:-5], 0x1),
        (b"x", 0x101),
        (b"x", 0x201),
        (b"x", 0x701),
        (lz4.frame.compress(b"hello" * 100)[:-5], 0x101),
        (zstandard.compress(b"hello" * 100)[:-5], 0x201),
    ],
)
def test_a_body_that_cannot_be_unpacked_says_so_when_read(body: bytes, sys_flag: int) -> None:
    """The message can still be returned with ``retry``, or acknowledged."""
    view = MessageView(record(body, b"UNIQ_KEY\x01ID\x02", sys_flag=sys_flag), "broker-a")

    with pytest.raises(UnreadableBodyError, match="ID"):
        _ = view.body
    assert view.message_id == "ID"


COMPRESSIONS: Final = [
    (zlib.compress, 0x1),
    (zlib.compress, 0x301),
    (lz4.frame.compress, 0x101),
    (zstandard.compress, 0x201),
]


@pytest.mark.parametrize(("compress", "sys_flag"), COMPRESSIONS)
def test_a_body_that_would_fill_the_memory_is_not_unpacked(
    compress: Callable[[bytes], bytes], sys_flag: int
) -> None:
    """A few kilobytes can expand to gigabytes."""
    content = bytes(DECOMPRESSED_SIZE_MAX + 1)
    view = MessageView(record(compress(content), sys_flag=sys_flag), "broker-a")

    with pytest.raises(UnreadableBodyError, match="limit"):
        _ = view.body


@pytest.mark.parametrize(("compress", "sys_flag"), COMPRESSIONS)
def test_a_body_is_read_however_it_was_compressed(
    compress: Callable[[bytes], bytes], sys_flag: int
) -> None:
    """Java clients since 5.0 can choose LZ4 or ZSTD."""
    view = MessageView(record(compress(b"hello" * 100), sys_flag=sys_flag), "broker-a")

    assert view.body == b"hello" * 100


@pytest.mark.parametrize(("name", "sys_flag"), [("zlib", 0x1), ("lz4", 0x101), ("zstd", 0x201)])
def test_a_compression_is_chosen_by_name(name: Compression, sys_flag: int) -> None:
    """The flags say which, as Java clients write them, and every client reads it."""
    config = ClientConfig(compression=name)
    sent = encode_message(Message("orders", b"hello" * 1000), "ID", config)

    assert (sent.sys_flag, len(sent.body) < 1000) == (sys_flag, True)
    assert MessageView(record(sent.body, sys_flag=sys_flag), "broker-a").body == b"hello" * 1000


@pytest.mark.parametrize("name", ["gzip", None, 1, [], "ZSTD"])
def test_an_unknown_compression_is_an_error(name: Compression) -> None:
    """It is found when the configuration is made."""
    with pytest.raises(ConfigurationError, match="zlib, lz4 or zstd"):
        ClientConfig(compression=name)


def test_a_compression_tells_what_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfmq.client.config.find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'halfmq\[compression\]'"):
        ClientConfig(compression="zstd")


@pytest.mark.parametrize(("module", "sys_flag"), [("lz4.frame", 0x101), ("zstandard", 0x201)])
def test_a_body_tells_what_has_to_be_installed(
    monkeypatch: pytest.MonkeyPatch, module: str, sys_flag: int
) -> None:
    """The libraries are an extra."""
    monkeypatch.setitem(sys.modules, module, None)
    view = MessageView(record(b"x", sys_flag=sys_flag), "broker-a")

    with pytest.raises(UnreadableBodyError, match=r"pip install 'halfmq\[compression\]'"):
        _ = view.body


async def test_a_message_under_check_cannot_be_acked() -> None:
    """A check is answered with a Decision; ``ack`` would have no effect."""
    with pytest.raises(ClientError, match="Decision"):
        await MessageView(record(), "broker-a").ack()
