"""What the figures were taken on: a number without its machine says nothing."""

import os
import platform
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True):
    """The machine and what else was going on when the run began."""

    processor: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    file_system: str
    load_average: tuple[float, float, float]


def describe_machine(directory: Path) -> Machine:
    """Look at the machine; ``directory`` is where the stores lie."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory_gib=round(pages / 2**30, 1),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        file_system=file_system_of(directory),
        load_average=os.getloadavg(),
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def file_system_of(directory: Path) -> str:
    """The type of the file system that holds ``directory``, for example ``ext4``."""
    resolved = directory.resolve()
    best, found = "", "unknown"
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _device, mount_point, kind, *_rest = line.split()
        if resolved.is_relative_to(mount_point) and len(mount_point) >= len(best):
            best, found = mount_point, kind
    return found
