"""A batch lies in the files as its messages would, appended one by one."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import example, given, settings

from halfmq.broker.handlers.batch_units import read_units
from halfmq.store.draft import Batch
from halfmq.store.format.batch import BatchUnit, encode_batch
from halfmq.store.format.flags import COMPRESSED
from halfmq.store.format.properties import encode_properties
from halfmq.store.message_store import MessageStore
from tests.support.stores import BORN, draft, flush, small_config

Message = tuple[bytes, dict[str, str], int]  # body, properties, flag


def batch(messages: Sequence[Message], queue_id: int = 0, sys_flag: int = 0) -> Batch:
    """Return a batch with these messages, as the broker reads it: those that are alike together."""
    units = [
        BatchUnit(flag, body, encode_properties(properties)) for body, properties, flag in messages
    ]
    given = draft("T", queue_id, sys_flag=sys_flag)
    return Batch(
        topic=given.topic,
        queue_id=queue_id,
        units=read_units(encode_batch(units), missing_wait=b"", suffix=b"CLUSTER\x01c\x02"),
        sys_flag=sys_flag,
        born_timestamp=given.born_timestamp,
        born_host=given.born_host,
        store_host=given.store_host,
    )


NO_TAG: dict[str, str] = {}
X, Y, X_AND_MORE = {"TAGS": "x"}, {"TAGS": "y"}, {"TAGS": "x", "A": "1"}
maps = st.sampled_from([NO_TAG, X, Y, X_AND_MORE])
flags = st.sampled_from([0, 1, -1])
messages = st.one_of(
    st.builds(
        lambda body, count, properties, flag, name: [
            (bytes([number]) + body, properties | {name: f"{number:02}"}, flag)
            for number in range(count)
        ],
        st.binary(max_size=300),
        st.integers(1, 20),
        maps,
        flags,
        st.sampled_from(["UNIQ_KEY", "KEYS"]),
    ),
    st.lists(st.tuples(st.binary(max_size=300), maps, flags), min_size=1, max_size=20),
)
batches = st.builds(batch, messages, st.integers(0, 1), st.sampled_from([0, COMPRESSED]))
FIRST = batch([(b"", NO_TAG, 0)])  # the first of a queue needs a file
DIFFERENT = [
    batch([(b"a", X, 0), (b"b", Y, 0), (b"c", X, 0)]),
    batch([(b"a", X, 0), (b"b", X, 1), (b"c", X, 0)]),
    batch([(b"a", X, 0), (b"b", X_AND_MORE, 0), (b"c", X, 0)]),
    batch([(b"a", X, 0), (b"bb", X, 0), (b"c", X, 0)]),
]
LARGE = batch([(bytes([number]) * 300, {"UNIQ_KEY": f"{number:02}"}, 0) for number in range(20)])


@settings(max_examples=60)
@given(st.lists(batches, min_size=1, max_size=12))
@example([FIRST, *DIFFERENT])
@example([LARGE] * 5)  # more than one file of the log
def test_a_batch_lies_as_its_messages_would(sent: list[Batch]) -> None:
    """The bytes of log and queues, and what the append returns; also at the ends of files."""
    with tempfile.TemporaryDirectory() as directory:
        together, alone = Path(directory, "together"), Path(directory, "alone")
        stores = [
            MessageStore(small_config(root), now_ms=lambda: BORN) for root in (together, alone)
        ]
        for store in stores:
            store.open()
        for one in sent:
            done = stores[0].append_batch(one)
            alike = stores[1].append(one.drafts(), contiguous=True)
            assert list(done.physical_offsets) == [each.physical_offset for each in alike]
            assert (done.end, done.queue_offset) == (alike[-1].end, alike[0].queue_offset)
            assert done.store_timestamp == alike[0].store_timestamp
        for store in stores:
            flush(store)
            store.close()

        for kind in ("commitlog", "consumequeue"):
            assert _content(together / kind) == _content(alone / kind)


def _content(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}
