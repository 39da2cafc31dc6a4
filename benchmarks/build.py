"""What is compiled or fetched once, and kept in a cache directory."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SOURCE_DIRECTORY: Final = Path(__file__).parent
_FLAGS: Final = ("-O3", "-std=gnu11", "-Wall", "-Wextra", "-Werror")
_SOURCES: Final = {
    "loadgen": ("loadgen.c", "frames.c", "messages.c", "options.c", "counters.c"),
    "echo": ("echo.c", "frames.c", "messages.c"),
    "limits": ("limits.c",),
}
_COMPILE_TIMEOUT: Final = 120.0  # seconds; one program takes about two


class CompilerMissingError(Exception):
    """There is no C compiler on this machine, so nothing can be measured."""


def cache_directory() -> Path:
    """Where programs, peers and stores are kept: ``HALFMQ_BENCHMARKS_DIR`` or below ``~/.cache``.

    Not the system's temporary directory: that may be a memory disk, where fdatasync costs nothing.
    """
    directory = os.environ.get("HALFMQ_BENCHMARKS_DIR")
    path = Path(directory) if directory else Path.home() / ".cache" / "halfmq-benchmarks"
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def being_made(directory: Path) -> Iterator[Path]:
    """Give a directory to fill, which gets its name when it is complete."""
    unfinished = Path(tempfile.mkdtemp(dir=directory.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)
        with contextlib.suppress(OSError):  # another run was faster: its directory serves as well
            unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def build(name: str, directory: Path | None = None) -> Path:
    """Return a program of ``_SOURCES``, compiled from them as they are now.

    Raises:
        CompilerMissingError: Neither ``gcc`` nor ``cc`` is on the path.
        subprocess.CalledProcessError: The sources do not compile.
    """
    program = (directory or cache_directory()) / f"{name}-{_fingerprint()}"
    if program.exists():
        return program
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise CompilerMissingError(
            "the benchmarks need gcc (Debian: apt-get install gcc libc6-dev)"
        )
    unfinished = program.with_suffix(f".{os.getpid()}")
    sources = [str(SOURCE_DIRECTORY / source) for source in _SOURCES[name]]
    command = [compiler, *_FLAGS, *sources, "-o", str(unfinished)]
    subprocess.run(command, check=True, timeout=_COMPILE_TIMEOUT)
    unfinished.replace(program)  # another run may build the same at the same time
    for stale in set(program.parent.glob(f"{name}-????????????????")) - {program}:
        stale.unlink(missing_ok=True)
    return program


def _fingerprint() -> str:
    """A changed source or flag gives another name, so a stale program is never run."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted(SOURCE_DIRECTORY.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
