"""The limits M and D, measured by ``limits.c`` in the same run as everything else."""

import subprocess
from pathlib import Path
from typing import Final

import msgspec

from .build import build

_MEASUREMENTS: Final = 4  # copy, CRC, single and sequential writes, each of the given length
_TIMEOUT: Final = 60.0  # seconds beside the measurements; the file is written first


class Limits(msgspec.Struct, frozen=True):
    """What memory and disk allow; the memory figures are absent when only the disk was measured."""

    fdatasync_per_second: float
    sequential_mb_per_second: float
    copy_us: float | None = None
    crc_us: float | None = None

    @property
    def memory_us(self) -> float | None:
        """M: microseconds to copy one stored record and to sum up its body."""
        if self.copy_us is None or self.crc_us is None:
            return None
        return self.copy_us + self.crc_us


def measure_limits(directory: Path, *, seconds: float, disk_only: bool = False) -> Limits:
    """Measure on the disk that holds ``directory``; takes up to four times ``seconds``."""
    command = [str(build("limits")), str(directory), str(seconds)]
    if disk_only:
        command.append("--disk-only")
    timeout = seconds * _MEASUREMENTS + _TIMEOUT
    done = subprocess.run(command, capture_output=True, check=True, timeout=timeout)
    return msgspec.json.decode(done.stdout, type=Limits)
