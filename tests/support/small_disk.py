"""File systems of a few megabytes, mounted for one test; that needs root, on Linux."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

KINDS: Final = ("tmpfs", "ext4")
PIECE: Final = 1 << 16  # bytes


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def small_disk(directory: Path, kind: str, size: int) -> Iterator[Path]:
    """Mount a file system of about so many bytes; skip the test, and say so, where that fails."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("NOT RUN: a small file system can be mounted by root on Linux only")
    place = directory / f"disk-{kind}"
    place.mkdir()
    try:
        if kind == "tmpfs":
            _run("mount", "-t", "tmpfs", "-o", f"size={size}", "none", place)
        else:
            image = directory / "disk.img"
            with image.open("wb") as file:
                file.truncate(size)
            _run("mkfs.ext4", "-q", "-m", "0", image)
            _run("mount", "-o", "loop", image, place)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"NOT RUN: no {kind} can be mounted here: {reason.strip()}")
    try:
        yield place
    finally:
        try:
            _run("umount", place)
        except subprocess.CalledProcessError:  # somebody is still in there: not for long
            _run("umount", "--lazy", place)
        if kind != "tmpfs":
            image.unlink()


def fill(path: Path, size: int | None = None) -> int:
    """Write a file of so many bytes, or of all that there is room for; return its size."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    written = 0
    try:
        while size is None or written < size:
            wanted = PIECE if size is None else min(PIECE, size - written)
            try:
                written += os.write(fd, os.urandom(wanted))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                if wanted <= 512:
                    break
                size = written + 512  # the last sectors, one by one
        os.fsync(fd)
    finally:
        os.close(fd)
    return written
