"""Limits of the disk: first a warning, then messages are refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from halfmq.broker.config import DiskConfig
from halfmq.broker.disk.disk_limits import DiskLimits, Space, space_of
from halfmq.broker.disk.send_refusal import SendRefusal
from halfmq.remoting.codes import ResponseCode

GIB = 1 << 30
SIZE = 100 * GIB  # scarce below 25 GiB, full below 10


class Watched:
    """The limits of a disk whose space the test sets."""

    def __init__(self, config: DiskConfig | None = None) -> None:
        self.free = 90 * GIB
        self.ahead = 0
        self.unknown = False
        self.refusal = SendRefusal()
        self.limits = DiskLimits(
            config or DiskConfig(),
            self.refusal,
            path=Path("/data/commitlog"),
            reserved_ahead=lambda: self.ahead,
            space_of=self.space_of,
        )

    def space_of(self, _path: Path) -> Space:
        if self.unknown:
            raise OSError(errno.EIO, "no idea")
        return Space(self.free, SIZE)

    def look(self, free: float) -> str:
        """Set the free GiB and test the disk; return the state of the disk."""
        self.free = int(free * GIB)
        self.limits.tick()
        assert self.refusal.refusing is self.limits.is_full
        if self.limits.is_full:
            assert self.limits.is_scarce
            return "full"
        return "scarce" if self.limits.is_scarce else "plenty"


def test_a_disk_gets_scarce_and_then_full() -> None:
    """Each state ends one percent later than it began, so it does not flicker."""
    one = Watched()

    assert [one.look(free) for free in (90, 25, 24.9, 10, 9.9)] == [
        "plenty", "plenty", "scarce", "scarce", "full",
    ]  # fmt: skip
    assert [one.look(free) for free in (10.9, 11, 10, 25.9, 26, 9, 90)] == [
        "full", "scarce", "scarce", "scarce", "plenty", "full", "plenty",
    ]  # fmt: skip


def test_the_refusal_names_the_limit_and_the_remedy() -> None:
    """With a code after which all official clients try another broker."""
    one = Watched()
    one.look(5)

    refusal = one.refusal.refusal()

    assert refusal.code is ResponseCode.SERVICE_NOT_AVAILABLE
    assert refusal.remark.startswith("[DISK]the disk of /data/commitlog is 95 % full")
    assert "diskSpaceWarningLevelRatio=90" in refusal.remark
    assert one.limits.metrics()["messages_refused"] == 1


def test_space_reserved_for_the_log_counts_as_free() -> None:
    """A new log file changes no state."""
    one = Watched()
    one.ahead = 6 * GIB

    assert [one.look(free) for free in (19, 18.9, 4, 3.9)] == ["plenty", "scarce", "scarce", "full"]


def test_a_limit_of_a_hundred_percent_is_never_reached() -> None:
    """Then only the disk itself refuses."""
    one = Watched(DiskConfig(warn_ratio=100, refuse_ratio=100))

    assert one.look(0) == "plenty"


def test_a_full_disk_is_also_scarce() -> None:
    """Old files are deleted at any hour while messages are refused, whatever the lower limit."""
    one = Watched(DiskConfig(warn_ratio=95, refuse_ratio=80))

    assert one.look(19) == "full"


def test_the_state_stays_if_the_disk_cannot_be_tested() -> None:
    """It is that of the last test."""
    one = Watched()
    one.look(5)
    one.unknown = True

    assert one.look(90) == "full"


def test_changes_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """With the used and the free space."""
    caplog.set_level("INFO", "halfmq")
    one = Watched()

    for free in (90, 24, 20, 9, 8, 90, 90):
        one.look(free)

    events = [record.getMessage().split()[0] for record in caplog.records]
    assert events == [
        "event=disk_scarce", "event=disk_full", "event=disk_full_over", "event=disk_scarce_over",
    ]  # fmt: skip
    assert f"used_percent=76 left_bytes={24 * GIB}" in caplog.text


def test_space_is_counted_as_df_does(tmp_path: Path) -> None:
    """Space reserved for root is neither free nor in use."""
    space = space_of(tmp_path)
    found = os.statvfs(tmp_path)

    assert 0 < space.free <= space.size
    assert space.size <= found.f_blocks * found.f_frsize


def test_messages_are_refused_while_there_is_a_reason() -> None:
    """Free space does not end the refusal after a failed flush."""
    refusal = SendRefusal()
    seen = [refusal.refusing]

    refusal.end("disk_full")
    seen.append(refusal.refusing)
    refusal.begin("disk_full", ResponseCode.SERVICE_NOT_AVAILABLE, "full")
    refusal.begin("disk_behind", ResponseCode.SYSTEM_BUSY, "behind")
    refusal.end("disk_full")
    seen.append(refusal.refusing)
    told = refusal.refusal()
    refusal.end("disk_behind")
    seen.append(refusal.refusing)

    assert seen == [False, False, True, False]
    assert (told.code, told.remark) == (ResponseCode.SYSTEM_BUSY, "behind")
    assert refusal.count == 1
