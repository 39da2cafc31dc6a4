"""``python -m halfmq.spark_jobs.archive DIR``: write what a cluster needs to run the jobs.

``halfmq.zip`` is for ``spark-submit --py-files``: the Python sources of the jobs. Executors need
numpy and PyArrow besides. ``halfmq_jobs.py`` is the program to submit, with the arguments of
``python -m halfmq.spark_jobs``.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

ARCHIVE: Final = "halfmq.zip"
PROGRAM: Final = "halfmq_jobs.py"
PACKAGES: Final = ("halfmq.store.format", "halfmq.spark_jobs")

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
    with TemporaryDirectory() as root:
        for package in PACKAGES:
            with as_file(files(package)) as source:
                target = Path(root, *package.split("."))
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        # It has an entry for each folder; without one, ``halfmq`` would not be a namespace package.
        shutil.make_archive(str(path.with_suffix("")), "zip", root)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files and print the command that uses them."""
    parser = argparse.ArgumentParser(
        prog="python -m halfmq.spark_jobs.archive",
        description="Write what a Spark cluster needs to run the jobs.",
    )
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="output directory; created if missing"
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
