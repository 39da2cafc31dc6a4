"""Records taken apart in columns say what each of them says."""

from hypothesis import given
from hypothesis import strategies as st

from halfmq.store.format.columns import ones, progression
from halfmq.store.format.properties import encode_properties, tags_code
from halfmq.store.format.queue_entry import unpack_entries
from halfmq.store.format.record import QUEUE_OFFSET_AT, encode_record, new_record
from halfmq.store.log_run import RUN_LENGTH_MIN, Runs
from halfmq.store.log_scan import find_records
from tests.support.stores import BORN, HOST

LONG_MAX = 2**63 - 1
IN_TURN = st.integers(1, 9).map(lambda count: [number % count for number in range(99)])
QUEUES = st.one_of(IN_TURN, st.lists(st.integers(-1, 3), min_size=99, max_size=99))
TAGS = st.lists(st.sampled_from(["new", "old", "wet"]), min_size=1, max_size=99)

Row = tuple[int, int, int]  # queue id, queue offset, tags code


def log_of(start: int, queues: list[int], tags: list[str], base: int) -> bytes:
    """Return one record more than the shortest run has; queues begin at ``base`` and on."""
    following: dict[int, int] = {}
    content = b""
    for number in range(RUN_LENGTH_MIN + 1):
        queue_id = queues[number]
        queue_offset = following.get(queue_id, base + queue_id)
        following[queue_id] = queue_offset + 1
        content += encode_record(
            new_record(
                topic="T",
                queue_id=queue_id,
                queue_offset=queue_offset,
                physical_offset=start + len(content),
                body=b"%05d" % number,
                properties=encode_properties(
                    {"U": f"{number:04d}", "TAGS": tags[number % len(tags)]}
                ),
                born_timestamp=BORN,
                born_host=HOST,
                store_timestamp=BORN,
                store_host=HOST,
            )
        )
    return content


def truth(chunk: bytes, start: int) -> list[Row]:
    return [
        (queue_id, queue_offset, tags_code(chunk[properties_at : position + size]))
        for position, size, _, queue_id, queue_offset, _, properties_at in find_records(
            chunk, start, check_crc=True, count_max=RUN_LENGTH_MIN
        )
    ]


def taken_apart(chunk: bytes, start: int) -> list[Row] | None:
    run = Runs(check_crc=True).at(chunk, 0, start, LONG_MAX)
    if run is None:
        return None
    rows = {
        entry.physical_offset: (queue_id, queue_offset, entry.tags_code)
        for (_, queue_id), first, entries, _ in run.shares
        for queue_offset, entry in enumerate(unpack_entries(entries), first)
    }
    assert run.length == len(rows)
    return [rows[offset] for offset in sorted(rows)]


@given(start=st.integers(0, 2**60), queues=QUEUES, tags=TAGS, base=st.integers(1, 2**62))
def test_a_run_says_what_its_records_say(
    start: int, queues: list[int], tags: list[str], base: int
) -> None:
    """Wherever they lie, whichever queues they go to, in turn or not."""
    chunk = log_of(start, queues, tags, base)

    assert taken_apart(chunk, start) == truth(chunk, start)


@given(
    queues=QUEUES,
    base=st.integers(1, 2**62),
    number=st.integers(0, RUN_LENGTH_MIN - 1),
    wrong=st.one_of(st.integers(-(2**63), LONG_MAX), st.integers(-3, 3)),
)
def test_a_queue_offset_out_of_order_makes_no_run(
    queues: list[int], base: int, number: int, wrong: int
) -> None:
    """Not even where sums over all of them would come out the same."""
    chunk = bytearray(log_of(0, queues, ["new"], base))
    at = number * len(chunk) // (RUN_LENGTH_MIN + 1) + QUEUE_OFFSET_AT
    right = int.from_bytes(chunk[at : at + 8], "big", signed=True)
    chunk[at : at + 8] = (wrong if abs(wrong) > 3 else right + wrong).to_bytes(
        8, "big", signed=True
    )

    found = taken_apart(bytes(chunk), 0)

    assert found is None or found == truth(bytes(chunk), 0)


def test_a_negative_queue_offset_is_no_carry() -> None:
    """The one after -1 is 0, and the sum of all would put 1 into another queue's."""
    chunk = bytearray(log_of(0, [number % 2 for number in range(99)], ["new"], 9))
    size = len(chunk) // (RUN_LENGTH_MIN + 1)
    for number in range(RUN_LENGTH_MIN + 1):
        queue_offset = number // 2 - 1 if number % 2 else 10 + number // 2 + (number > 0)
        at = number * size + QUEUE_OFFSET_AT
        chunk[at : at + 8] = queue_offset.to_bytes(8, "big", signed=True)

    assert taken_apart(bytes(chunk), 0) is None


@given(first=st.integers(0, 2**62), step=st.integers(0, 2**40), count=st.integers(1, 600))
def test_a_progression_is_what_it_is_number_by_number(first: int, step: int, count: int) -> None:
    """And the number whose digits are all 1 has as many of them."""
    numbers = [first + step * place for place in range(count)]

    assert progression(first, step, count) == b"".join(one.to_bytes(8, "big") for one in numbers)
    assert ones(count).to_bytes(8 * count, "big") == (1).to_bytes(8, "big") * count
