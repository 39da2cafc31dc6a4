"""``python -m halfmq.spark_jobs NAME``: run one of the jobs.

Exit codes: 0 nothing to report, 1 there are findings, 2 the job could not be done.
"""

import argparse
import sys
from collections.abc import Sequence

from halfmq.spark_jobs.errors import SparkJobsError
from halfmq.spark_jobs.jobs import audit, export, lag, reconcile, traffic
from halfmq.spark_jobs.jobs.command import FAILED, INTERRUPTED

_JOBS = (audit, traffic, lag, reconcile, export)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except (SparkJobsError, OSError) as error:
        sys.stderr.write(f"{options.job}: {error}\n")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m halfmq.spark_jobs",
        description="PySpark jobs over the commit log of halfmq or of Apache RocketMQ.",
    )
    jobs = parser.add_subparsers(dest="job", metavar="NAME", required=True)
    for job in _JOBS:
        job.add(jobs)
    return parser


if __name__ == "__main__":
    sys.exit(main())
