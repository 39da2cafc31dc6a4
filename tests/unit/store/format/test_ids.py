"""Message ids, hosts and Java's string hash."""

import os
import time
from collections.abc import Iterator

import pytest

from halfmq.store.format.ids import (
    OffsetMessageId,
    UniqueKeyFactory,
    java_string_hash,
    offset_message_id,
    pack_host,
    parse_offset_message_id,
    unpack_host,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", 0),
        ("A", 65),
        ("TagA", 2598919),
        ("TagB", 2598920),
        ("order-created", -392709271),
        ("中", 20013),
        ("a||b", 3012833),
        ("T#k1", 2539445),
        ("polygenelubricants", -2147483648),
        ("\U0001f600", 1772899),  # two UTF-16 units, 55357 * 31 + 56832
    ],
)
def test_the_string_hash_is_javas(text: str, value: int) -> None:
    """RocketMQ's index files and tag filters use it."""
    assert java_string_hash(text) == value


def test_a_lone_surrogate_is_hashed_as_java_does() -> None:
    """JSON may contain one, and it must not stop the broker."""
    assert java_string_hash("\ud83d") == 0xD83D


@pytest.mark.parametrize(
    ("address", "packed"),
    [
        ("127.0.0.1", "7f000001 00002a9f"),
        ("2001:db8::1", "20010db8000000000000000000000001 00002a9f"),
        ("fe80::1%eth0", "fe800000000000000000000000000001 00002a9f"),
    ],
)
def test_a_host_is_packed_as_records_hold_it(address: str, packed: str) -> None:
    """Address, then the port as int32; a zone belongs to the machine, not to the address."""
    assert pack_host(address, 10911) == bytes.fromhex(packed)
    assert unpack_host(bytes.fromhex(packed)) == (address.partition("%")[0], 10911)


@pytest.mark.parametrize(
    ("address", "port"), [("localhost", 1), ("1.2.3", 1), ("", 1), ("::g", 1), ("1.2.3.4", 65536)]
)
def test_what_is_no_host_is_refused(address: str, port: int) -> None:
    """Only numeric addresses are accepted; names are resolved elsewhere."""
    with pytest.raises(ValueError, match="is not"):
        pack_host(address, port)


def test_a_packed_host_of_another_size_is_refused() -> None:
    """Its port would be read from the wrong bytes."""
    with pytest.raises(ValueError, match="not 9"):
        unpack_host(bytes(9))


@pytest.mark.parametrize(
    ("address", "offset", "text"),
    [
        ("127.0.0.1", 4096, "7F00000100002A9F0000000000001000"),
        ("10.0.0.5", 1073741950, "0A00000500002A9F000000004000007E"),
        ("2001:db8::1", 1, "20010DB800000000000000000000000100002A9F0000000000000001"),
    ],
)
def test_an_offset_message_id_says_where_a_record_lies(
    address: str, offset: int, text: str
) -> None:
    """Clients fetch a message by this id alone."""
    host = pack_host(address, 10911)

    assert offset_message_id(host, offset) == text
    assert parse_offset_message_id(text) == OffsetMessageId(host, offset)
    assert parse_offset_message_id(text.lower()) == OffsetMessageId(host, offset)


def test_an_id_can_hold_a_negative_offset() -> None:
    """A damaged or foreign record may link to any int64; Java formats it without a check."""
    host = pack_host("127.0.0.1", 10911)

    assert offset_message_id(host, -2) == "7F00000100002A9FFFFFFFFFFFFFFFFE"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7F",
        "7F00000100002A9F00000000000010",
        "7F00000100002A9F000000000000100G",
        "7F00000100002A9F8000000000000000",
        "7F 00 00 01 00 00 2A 9F 00 00 00",
        " " * 32,
    ],
)
def test_what_is_no_offset_message_id_is_refused(text: str) -> None:
    """Peers may send any text."""
    with pytest.raises(ValueError, match=r"."):
        parse_offset_message_id(text)


class Clock:
    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture(params=["UTC", "Asia/Shanghai", "America/New_York"])
def _time_zone(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = request.param
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


def local_ms(*fields: int) -> int:
    year, month, day, hour = fields
    return int(time.mktime((year, month, day, hour, 0, 0, 0, 0, -1)) * 1000)


def factory(clock: Clock, address: bytes = bytes((10, 0, 0, 5))) -> UniqueKeyFactory:
    return UniqueKeyFactory(
        address, process_id=0x7_1234, token=bytes.fromhex("5CB0D902"), now_ms=clock
    )


@pytest.mark.usefixtures("_time_zone")
def test_a_unique_key_holds_address_process_time_and_count() -> None:
    """Tools read the time out of it: ms since the month began, local time."""
    clock = Clock(local_ms(2026, 11, 3, 4) + 5)
    keys = factory(clock)
    offset = (2 * 24 + 4) * 3_600_000 + 5
    if time.localtime(local_ms(2026, 11, 1, 0) / 1000).tm_isdst:
        offset += 3_600_000  # the clocks go back in between

    assert keys.create() == f"0A00000512345CB0D902{offset:08X}0000"
    assert keys.create()[-4:] == "0001"


@pytest.mark.usefixtures("_time_zone")
def test_a_new_month_begins_at_zero() -> None:
    """Also at the end of a year."""
    clock = Clock(local_ms(2026, 12, 31, 23))
    keys = factory(clock)
    keys.create()
    clock.now_ms = local_ms(2027, 1, 1, 0) + 7

    assert keys.create()[20:28] == "00000007"


@pytest.mark.parametrize("step_ms", [0, -1, 1, -60_000])
def test_no_key_is_made_twice(step_ms: int) -> None:
    """Neither if the clock stops or steps back, nor if the counter wraps."""
    clock = Clock(1_700_000_000_000)
    keys = factory(clock)
    seen: set[str] = set()
    for _ in range(4):
        seen.update(keys.create() for _ in range(50_000))
        clock.now_ms += step_ms
        clock.now_ms = max(clock.now_ms, 1_700_000_000_000 - 60_000)

    assert len(seen) == 200_000


@pytest.mark.usefixtures("_time_zone")
def test_a_clock_that_steps_back_into_the_previous_month_gives_keys_of_that_month() -> None:
    """A time before the month began would be negative."""
    clock = Clock(local_ms(2026, 12, 1, 0))
    keys = factory(clock)
    keys.create()
    clock.now_ms = local_ms(2026, 11, 30, 23)

    assert int(keys.create()[20:28], 16) // 3_600_000 in {29 * 24 + 23, 29 * 24 + 24}


def test_an_ipv6_address_gives_a_key_of_56_characters() -> None:
    assert len(factory(Clock(1), bytes(16)).create()) == 56


def test_a_factory_refuses_parts_of_another_size() -> None:
    """The key would have a length that no reader accepts."""
    with pytest.raises(ValueError, match="address"):
        UniqueKeyFactory(bytes(5), process_id=1, token=bytes(4), now_ms=Clock(1))
    with pytest.raises(ValueError, match="token"):
        UniqueKeyFactory(bytes(4), process_id=1, token=bytes(5), now_ms=Clock(1))
