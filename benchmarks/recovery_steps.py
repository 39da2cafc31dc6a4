"""The steps of ``benchmarks.recovery``, each in a process of its own; a step prints a JSON object.

``fill`` writes a log whose checkpoint stays at its beginning and dies by SIGKILL: everything in it
has to be looked at again. ``limits`` reads the files of a log as fast as Python can, from the disk
and from memory, and sums up kilobytes. ``warm`` has a store in the page cache.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Final

from halfmq.store.config import FlushMode, StoreConfig
from halfmq.store.format.crc import crc32
from halfmq.store.format.ids import pack_host
from halfmq.store.format.properties import encode_properties, tags_code
from halfmq.store.log.append_request import AppendRequest
from halfmq.store.message_store import MessageStore

KINDS: Final[dict[str, tuple[tuple[int, ...], int]]] = {
    "1 KiB": ((1024,), 1),
    "4 KiB": ((4096,), 1),
    "200 B": ((200,), 1),
    "mixed": ((200, 1024, 4096), 24),
}
"""Sizes of bodies in bytes, and how many topics, of which each record takes any."""

_QUEUES: Final = 8
_APPENDED_AT_ONCE: Final = 100
_NEVER_MS: Final = 86_400_000  # between two checkpoints
_READ_AT_ONCE: Final = 1 << 20  # bytes, as recovery does
_SUMMED_AT_ONCE: Final = 1024  # bytes
_LIMIT_BYTES: Final = 2 << 30  # of a log that are read for the limits
_HOST: Final = pack_host("127.0.0.1", 10911)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def messages(kind: str) -> Iterator[AppendRequest]:
    """Give messages without end; the same ones every time, but for their clock."""
    sizes, topics = KINDS[kind]
    random = Random(7)
    bodies = {size: random.randbytes(size) for size in sizes}
    for number in count():
        properties = encode_properties(
            {"UNIQ_KEY": f"7F00000100000000AB{number:014X}", "TAGS": "TagA", "WAIT": "true"}
        )
        yield AppendRequest(
            topic=f"topic-{random.randrange(topics):02d}",
            queue_id=number % _QUEUES,
            body=bodies[random.choice(sizes)],
            properties=properties,
            tags_code=tags_code(properties),
            born_timestamp=_now_ms(),
            born_host=_HOST,
            store_host=_HOST,
        )


def fill(root: Path, kind: str, size: int) -> dict[str, float]:
    """Write a log of about ``size`` bytes of which nothing but the records is known."""
    config = StoreConfig(
        root=root,
        flush_mode=FlushMode.ASYNC_FLUSH,
        flush_interval_consume_queue_ms=_NEVER_MS,
        index_enabled=False,  # a start builds it in any case, and here it only takes time
    )
    store = MessageStore(config, now_ms=_now_ms)
    store.open()
    began = time.perf_counter()
    source = messages(kind)
    records = 0
    while store.write_offset < size:
        records += len(store.append(list(islice(source, _APPENDED_AT_ONCE))))
        while store.write_offset - store.durable_offset > 256 << 20:
            time.sleep(0.005)
    while store.durable_offset < store.write_offset:
        store.request_flush()
        time.sleep(0.01)
    return {
        "seconds": time.perf_counter() - began,
        "log_bytes": store.write_offset,
        "records": records,
    }


def limits(root: Path) -> dict[str, float]:
    """Measure gigabytes (10⁹) per second on the files of a log."""
    paths = sorted((root / "commitlog").iterdir())
    forget(paths)
    cold = _read(paths)
    warm = _read(paths)
    piece = os.urandom(_SUMMED_AT_ONCE)
    rounds = 200_000
    began = time.perf_counter()
    for _ in range(rounds):
        crc32(piece)
    summed = rounds * len(piece) / (time.perf_counter() - began) / 1e9
    return {"cold_gb_s": cold, "warm_gb_s": warm, "crc_gb_s": summed}


def _read(paths: Sequence[Path], bytes_max: int = _LIMIT_BYTES) -> float:
    """Read files from their beginnings, in all so many bytes; return gigabytes per second."""
    done, began = 0, time.perf_counter()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            position = 0
            while done < bytes_max and (piece := os.pread(fd, _READ_AT_ONCE, position)):
                position += len(piece)
                done += len(piece)
        finally:
            os.close(fd)
    return done / (time.perf_counter() - began) / 1e9


def warm(root: Path) -> dict[str, float]:
    """Have log and queues in the page cache."""
    paths = [*(root / "commitlog").iterdir(), *root.glob("consumequeue/*/*/*")]
    return {"gb_s": _read(paths, sys.maxsize)}


def forget(paths: Sequence[Path]) -> None:
    """Drop files from the page cache; what is not on disk yet gets there first."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


STEPS: Final[dict[str, Callable[..., dict[str, float]]]] = {
    "fill": lambda root, kind, size: fill(Path(root), kind, int(size)),
    "limits": lambda root: limits(Path(root)),
    "warm": lambda root: warm(Path(root)),
}


def main(name: str, *arguments: str) -> None:
    """Run one step, print its figures, and die without closing anything."""
    print(json.dumps(STEPS[name](*arguments)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
