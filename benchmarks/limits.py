"""The limits M and D, measured by ``limits.c`` in the same run as everything else."""

import subprocess
from pathlib import Path
from typing import Final

import msgspec

from .build import build

_MEASUREMENTS: Final = 4  # copy, CRC, single and sequential writes, each of the given length
_TIMEOUT: Final = 60.0  # seconds beside the measurements; the file is written first


class Limits(msgspec.Struct, frozen=True):
    """What disk and memory allow."""

    fdatasync_per_second: float  # D
    sequential_mb_per_second: float | None = None  # None, as below: only D was measured
    copy_us: float | None = None
    crc_us: float | None = None

    @property
    def memory_us(self) -> float | None:
        """M: microseconds to copy one stored record and to sum up its body."""
        if self.copy_us is None or self.crc_us is None:
            return None
        return self.copy_us + self.crc_us


def measure_limits(directory: Path, *, seconds: float, single_only: bool = False) -> Limits:
    """Measure on the disk that holds ``directory``; ``seconds`` for each of up to four figures."""
    command = [str(build("limits")), str(directory), str(seconds)]
    if single_only:
        command.append("--single-only")
    timeout = seconds * _MEASUREMENTS + _TIMEOUT
    done = subprocess.run(command, capture_output=True, check=True, timeout=timeout)
    return msgspec.json.decode(done.stdout, type=Limits)
