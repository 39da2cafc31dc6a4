"""What an audit has seen of full segments, kept for the next audit; no Spark in here.

A segment that is full does not change any more, and what an audit needs of it is a few
hundredths of its size. Of each split of such a segment the cache has two Parquet files:

* ``SEGMENT-START-STOP-CHECKSUM.parquet``: a ``Seen``, as columns of packed numbers;
* ``SEGMENT-START-STOP-names-CHECKSUM.parquet``: the names of its halves, for Spark to read.

Nothing in here is believed unseen. The checksum in a file's name is that of its content. The first
file names the second, and tells what it was made from: the segment's size, and a *stamp*, a
checksum of samples of the segment: its first and last bytes, some in between, and the beginning of
every range that could not be read. Times of files are no part of it: a copy has others, and a
damaged file may have the same. Where the broker keeps digests of its files, that of the segment
must be the same too. What does not fit, for whatever reason, is made anew.

A flipped bit in a segment that has been read before can go unseen: to look for those, audit
without the cache, or run ``halfmq store verify``.
"""

import json
import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet

from ..errors import CacheError
from ..log.arrays import Bools, Ints, texts
from ..log.files import child, exists, open_remote, parent, read_bytes
from ..log.segments import Segment
from .digest import Seen
from .events import EVENT, OP_ENTRY, Told
from .queues import QUEUED, Queued

VERSION: Final = 1  # of the format; entries of another are made anew
_SAMPLES: Final = 64  # per segment, a quarter of a megabyte in all
_SAMPLE_SIZE: Final = 4 << 10  # bytes
_WATCHED_MAX: Final = 1_000  # further samples; a segment with more unreadable ranges is rubbish
_CHECKSUM: Final = 32  # hexadecimal digits
_NAME: Final = re.compile(r"(\d{20})-\d+-\d+(?:-names)?-[0-9a-f]{32}\.parquet")
_FACTS: Final = b"halfmq"  # the key in the file's metadata
_RISING: Final = {"at", "slot", "end", "reference", "time"}  # small when told as differences

Numbers = npt.NDArray[Any]


class Part(NamedTuple):
    """A split of a full segment."""

    segment: Segment
    start: int
    stop: int
    limit: int  # bytes of the segment that belong to the log

    @property
    def prefix(self) -> str:
        """What the names of its files begin with."""
        return f"{self.segment.base:020}-{self.start}-{self.stop}-"


class Cached(NamedTuple):
    """What the cache has of a split."""

    seen: Seen
    names: str  # path of the file with the names of its halves


class AuditCache:
    """The cache in a folder, which every worker can reach."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def load(self, part: Part, *, verify_crc: bool) -> Cached | None:
        """Return what is known of a split; None when nothing is, or not to be believed."""
        for path in self._entries(part.prefix):
            try:
                content = _checked(path)
                table = parquet.read_table(pa.BufferReader(content))
                facts = json.loads(table.schema.metadata[_FACTS])
                if _fits(facts, part, verify_crc=verify_crc):
                    names = self._folder / facts["names"]
                    _checked(names)
                    return Cached(_unpacked(table, facts), str(names))
            except (OSError, ValueError, KeyError, TypeError, IndexError):
                continue  # ArrowInvalid is a ValueError
        return None

    def store(self, part: Part, seen: Seen, names: pa.Table, *, verify_crc: bool) -> Cached:
        """Keep what was seen of a split, instead of what is there.

        Raises:
            CacheError: It cannot be written.
        """
        watched = [start - part.segment.base for start, _, _ in seen.holes][:_WATCHED_MAX]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            outdated = self._entries(part.prefix)
            beside = self._write(f"{part.prefix}names-", names)
            facts = {
                "version": VERSION,
                "size": part.segment.size,
                "limit": part.limit,
                "crc": verify_crc,
                "watched": watched,
                "stamp": stamp(part.segment, part.limit, watched),
                "digest": _digest_of(part.segment),
                "names": beside.name,
                **_facts_of(seen),
            }
            made = self._write(part.prefix, _packed(seen, facts))
            for path in outdated:
                if path not in {made, beside}:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise CacheError(str(self._folder), error.strerror or str(error)) from error
        return Cached(seen, str(beside))

    def forget_before(self, offset: int) -> None:
        """Delete what is about segments that begin in front of an offset: the log has them no more.

        Raises:
            CacheError: The folder cannot be read.
        """
        try:
            for path in self._folder.iterdir() if self._folder.is_dir() else ():
                named = _NAME.fullmatch(path.name)
                if named is not None and int(named[1]) < offset:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise CacheError(str(self._folder), error.strerror or str(error)) from error

    def _entries(self, prefix: str) -> list[Path]:
        return sorted(self._folder.glob(f"{prefix}*.parquet"))

    def _write(self, prefix: str, table: pa.Table) -> Path:
        """Write a file under the name of its content; it is there as a whole or not at all."""
        sink = pa.BufferOutputStream()
        parquet.write_table(table, sink, compression="zstd", use_dictionary=False)
        content = sink.getvalue()
        path = self._folder / f"{prefix}{_checksum(content)}.parquet"
        with NamedTemporaryFile(dir=self._folder, suffix=".tmp", delete=False) as file:
            try:
                file.write(content)
                file.close()
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        return path


def stamp(segment: Segment, limit: int, watched: Sequence[int] = ()) -> str:
    """Return a checksum of samples of a segment, also of those that begin at ``watched``.

    Raises:
        OSError: The segment cannot be read.
    """
    last = max(limit - _SAMPLE_SIZE, 0)
    places = {last * number // (_SAMPLES - 1) for number in range(_SAMPLES)}
    content = sha256(b"%d %d" % (segment.size, limit))
    with open_remote(segment.path) as file:
        for place in sorted(places | set(watched)):
            content.update(file.read_at(min(_SAMPLE_SIZE, limit - place), place))
    return content.hexdigest()


def _digest_of(segment: Segment) -> str | None:
    """Return a checksum of the digest that the broker keeps of a segment, if it does."""
    folder = parent(segment.path)
    path = child(child(child(parent(folder), "digests"), "commitlog"), f"{segment.base:020}")
    return _checksum(read_bytes(path)) if exists(path) else None


def _fits(facts: dict[str, Any], part: Part, *, verify_crc: bool) -> bool:
    """Tell whether an entry was made from the segment as it is now, in this format."""
    told = (facts["version"], facts["size"], facts["limit"])
    if told != (VERSION, part.segment.size, part.limit) or (verify_crc and not facts["crc"]):
        return False
    digests = {facts["digest"], _digest_of(part.segment)} - {None}
    # The broker makes them a little later, and a copied log may come without.
    return len(digests) < 2 and stamp(part.segment, part.limit, facts["watched"]) == facts["stamp"]


def _checked(path: Path) -> bytes:
    """Read a file whose name has the checksum of its content."""
    content = path.read_bytes()
    if not path.name.endswith(f"-{_checksum(content)}.parquet"):
        raise ValueError(f"{path} is damaged")
    return content


def _checksum(content: bytes | memoryview) -> str:
    return sha256(content).hexdigest()[:_CHECKSUM]


# --- Seen as a table of two columns: the name of an array, and its bytes


def _facts_of(seen: Seen) -> dict[str, Any]:
    """Return the part of ``Seen`` that is no array, as JSON has it."""
    return {
        "labels": [(label, *told) for label, told in seen.told.labels.items()],
        "topics": seen.queued.topics,
        "holes": seen.holes,
        "records": seen.records,
        "bytes": seen.size,
        "last_at": seen.last_at,
        "last_time": seen.last_time,
    }


def _packed(seen: Seen, facts: dict[str, Any]) -> pa.Table:
    arrays = dict(_arrays(seen))
    contents = [array.tobytes() for array in arrays.values()]
    offsets = np.cumsum([0, *map(len, contents)]).astype(np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(contents))]
    packed = pa.Array.from_buffers(pa.large_binary(), len(contents), buffers)
    schema = pa.schema(
        [pa.field("name", pa.string()), pa.field("packed", pa.large_binary())],
        metadata={_FACTS: json.dumps(facts)},
    )
    return pa.Table.from_arrays([texts(list(arrays)), packed], schema=schema)


def _arrays(seen: Seen) -> Iterator[tuple[str, Numbers]]:
    for name, records in (
        ("events", seen.told.events),
        ("ops", seen.told.op_entries),
        ("queued", seen.queued.slots),
    ):
        for field in records.dtype.names or ():
            values = np.ascontiguousarray(records[field])
            if field in _RISING:
                values = np.diff(values, prepend=values.dtype.type(0))
            yield f"{name}.{field}", values
    yield "bare", seen.told.bare
    yield "unread_ops", seen.told.unread_ops
    yield "unsound", seen.unsound


def _unpacked(table: pa.Table, facts: dict[str, Any]) -> Seen:
    names, contents = (column.to_pylist() for column in table.columns)
    arrays = dict(zip(names, contents, strict=True))

    def records(name: str, kind: np.dtype[np.void]) -> npt.NDArray[np.void]:
        columns = {f: np.frombuffer(arrays[f"{name}.{f}"], kind[f]) for f in kind.names or ()}
        made = np.zeros(len(next(iter(columns.values()))), dtype=kind)
        for field, values in columns.items():
            made[field] = np.cumsum(values, dtype=values.dtype) if field in _RISING else values
        return made

    def ints(name: str) -> Ints:
        return np.frombuffer(arrays[name], np.int64)

    bare: Bools = np.frombuffer(arrays["bare"], np.bool_)
    labels = {label: (group, topic) for label, group, topic in facts["labels"]}
    return Seen(
        Told(records("events", EVENT), bare, records("ops", OP_ENTRY), ints("unread_ops"), labels),
        Queued(records("queued", QUEUED), facts["topics"]),
        [(start, end, reason) for start, end, reason in facts["holes"]],
        ints("unsound"),
        facts["records"],
        facts["bytes"],
        facts["last_at"],
        facts["last_time"],
    )
