"""``python -m halfmq.spark_jobs.archive DIR``: write what a cluster needs to run the jobs.

``halfmq.zip`` is for ``spark-submit --py-files``: the Python sources of the jobs. Executors need
numpy and PyArrow besides. ``halfmq_jobs.py`` is the program to submit, with the arguments of
``python -m halfmq.spark_jobs``.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

ARCHIVE: Final = "halfmq.zip"
PROGRAM: Final = "halfmq_jobs.py"
# ``halfmq`` itself has no module: it is a namespace, and a folder in a zip must have an entry of
# its own to be one.
_PACKAGES: Final = (
    "halfmq.store.format",
    "halfmq.spark_jobs",
)
_PARENTS: Final = ("halfmq/", "halfmq/store/")
_TIME: Final = (1980, 1, 1, 0, 0, 0)  # the same sources make the same archive

_PROGRAM: Final = '''\
"""Run the jobs of halfmq: ``spark-submit --py-files halfmq.zip halfmq_jobs.py NAME ...``."""

import sys

from halfmq.spark_jobs.__main__ import main
from halfmq.spark_jobs.jobs.interrupt import end_on_interrupt

end_on_interrupt()
sys.exit(main())
'''


def write_archive(path: Path) -> None:
    """Write the archive for executors; the folder must exist."""
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for parent in _PARENTS:
            archive.writestr(ZipInfo(parent, _TIME), b"")
        for package in _PACKAGES:
            for name, content in _sources(files(package), package.replace(".", "/") + "/"):
                info = ZipInfo(name, _TIME)
                info.compress_type = ZIP_DEFLATED
                archive.writestr(info, content)


def _sources(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    yield prefix, b""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _sources(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith((".py", ".html", ".css", ".sql")):
            yield prefix + entry.name, entry.read_bytes()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files and print the command that uses them."""
    parser = argparse.ArgumentParser(
        prog="python -m halfmq.spark_jobs.archive",
        description="Write what a Spark cluster needs to run the jobs.",
    )
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="where to write; created if missing"
    )
    folder: Path = parser.parse_args(arguments).directory
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_archive(folder / ARCHIVE)
        (folder / PROGRAM).write_text(_PROGRAM, "utf-8")
    except OSError as error:
        sys.stderr.write(f"archive: {error}\n")
        return 2
    sys.stdout.write(
        f"spark-submit --master URL --py-files {folder / ARCHIVE} {folder / PROGRAM}"
        " audit DIRECTORY\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
