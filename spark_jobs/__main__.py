"""``python -m halfmq.spark_jobs NAME``: run one of the jobs.

Exit codes: 0 nothing to report, 1 there are findings, 2 the job could not be done, 130 Ctrl-C.
"""

# ruff: noqa: E402  the first lines handle Ctrl-C while the rest is imported

import os
import signal


def _end_at_once(*_: object) -> None:
    """Handle Ctrl-C while there are no child processes."""
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _end_at_once)

import sys
from collections.abc import Sequence

from halfmq.spark_jobs.jobs.interrupt import INTERRUPTED, end_on_interrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job and return its exit code."""
    # Imported here, after end_on_interrupt().
    import argparse  # noqa: PLC0415
    import contextlib  # noqa: PLC0415
    import io  # noqa: PLC0415

    try:
        from halfmq.spark_jobs.errors import SparkJobsError  # noqa: PLC0415
        from halfmq.spark_jobs.jobs import audit, export, lag, reconcile, traffic  # noqa: PLC0415
        from halfmq.spark_jobs.jobs.command import FAILED  # noqa: PLC0415
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        sys.stderr.write(f"{package} is not installed: run  pip install 'halfmq[spark]'\n")
        return 2

    parser = argparse.ArgumentParser(
        prog="python -m halfmq.spark_jobs",
        description="PySpark jobs over the commit log of halfmq or of Apache RocketMQ.",
    )
    jobs = parser.add_subparsers(dest="job", metavar="NAME", required=True)
    for job in (audit, traffic, lag, reconcile, export):
        job.add(jobs)
    options = parser.parse_args(arguments)
    try:
        is_alone = options.json == "-" and _is_one_pipe()
        with contextlib.redirect_stderr(io.StringIO() if is_alone else sys.stderr):
            code: int = options.run(options)
        sys.stdout.flush()
    except (SparkJobsError, OSError) as error:
        sys.stderr.write(f"{options.job}: {error}\n")
        out = sys.__stdout__
        if isinstance(error, OSError) and out is not None and sys.stdout is out:
            # At exit, Python would write the rest of standard output again, and print a trace.
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _is_one_pipe() -> bool:
    """Return whether standard output and standard error are the same pipe or file.

    ``spark-submit`` gives a Python program one pipe for both.
    """
    try:
        same = os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):  # it is no file
        return False
    return same and not sys.stderr.isatty()


if __name__ == "__main__":
    end_on_interrupt()
    sys.exit(main())
