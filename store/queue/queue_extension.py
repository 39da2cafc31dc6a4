"""Read RocketMQ's consume queue extensions, which it writes with ``enableConsumeQueueExt``.

An entry then holds an address in ``consumequeue_ext`` instead of its tags code: the offset of a
unit plus the lowest int64. halfmq writes no extensions, but accepts those of RocketMQ.
Source: RocketMQ ``ConsumeQueueExt.java``.
"""

import re
from pathlib import Path
from struct import Struct
from typing import Final

from ..files import disk

_ADDRESSES_BELOW: Final = -0x8000_0000  # tags codes are int32, so none is lower
_LOWEST: Final = -(1 << 63)
_UNIT: Final = Struct(">hqq")  # size, tags code, store time; then a bit map
_UNIT_SIZE_MIN: Final = 20  # bytes
_FILE_NAME: Final = re.compile(r"\d{20}", re.ASCII)


def is_extension(root: Path, topic: str, queue_id: int, address: int, code: int) -> bool:
    """Return whether ``address`` names a unit that holds the tags code ``code``.

    ``root`` is the store root. A flipped sign bit turns a code into an address, but not of a unit.
    """
    if address >= _ADDRESSES_BELOW:
        return False
    directory = root / "consumequeue_ext" / topic / str(queue_id)
    if not disk.is_directory(directory):
        return False
    offset = address - _LOWEST
    bases = [int(path.name) for path in disk.files(directory) if _FILE_NAME.fullmatch(path.name)]
    base = max((base for base in bases if base <= offset), default=None)
    if base is None:
        return False
    with disk.opened(directory / f"{base:020d}") as fd:
        content = disk.pread(fd, _UNIT.size, offset - base)
    if len(content) < _UNIT.size:
        return False
    size, held, _ = _UNIT.unpack(content)
    return bool(size >= _UNIT_SIZE_MIN and held == code)
