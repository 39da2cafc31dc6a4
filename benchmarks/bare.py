"""What the deletion of large files does to a program that has nothing to do with them.

A virtual machine may give its host the memory that a deletion frees, gigabytes within a second. The
host then changes page tables under all of its processors, and every program computes ten or a
hundred times more slowly for a moment, by the guest's own clock of processor time: no witness of
queues or stills tells that from work of the program's own. So a loop that only computes is timed
beside the deletion of as many files as the broker deletes.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

_TOUCHED: Final = 2_000  # bytes that a step looks at, each in another page
_PAGE: Final = 4096
_PIECE: Final = bytes(1 << 20)
_BEHIND_S: Final = 3.0  # that the loop goes on: the host gets its memory some time later


class BareLoop(NamedTuple):
    """The longest step of a loop that only computes, in ms of processor time."""

    usual_ms: float  # the median
    quiet_ms: float  # while nothing else happens
    beside_deletion_ms: float

    def __str__(self) -> str:
        return (
            f"a bare loop whose steps compute for {self.usual_ms:.1f} ms: the longest took "
            f"{self.quiet_ms:.1f} ms, and {self.beside_deletion_ms:.1f} ms beside the deletion of "
            "as many large files"
        )


def beside_deletion(folder: Path, files: int, size: int) -> BareLoop:
    """Write files of so many bytes, and time the loop before and while they are deleted."""
    paths = [folder / f"bare-{number}" for number in range(files)]
    for path in paths:
        _write(path, size)
    over = time.monotonic() + _BEHIND_S
    quiet = _steps(lambda: time.monotonic() >= over)
    with ThreadPoolExecutor(1) as pool:
        deleted = pool.submit(_delete, paths)
        beside = _steps(deleted.done)
        deleted.result()
    return BareLoop(quiet[len(quiet) // 2], quiet[-1], beside[-1])


def _write(path: Path, size: int) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(size // len(_PIECE)):
            file.write(_PIECE)
        os.fdatasync(file.fileno())


def _delete(paths: list[Path]) -> None:
    for path in paths:
        path.unlink()
    time.sleep(_BEHIND_S)


def _steps(is_over: Callable[[], bool]) -> list[float]:
    """Compute until told; return how long each step took, in ms of processor time, sorted."""
    content = bytearray(_TOUCHED * _PAGE)
    taken: list[float] = []
    while not taken or not is_over():
        began = time.thread_time()
        sum(content[place * _PAGE] for place in range(_TOUCHED))
        taken.append((time.thread_time() - began) * 1_000)
    return sorted(taken)
