"""What an audit has compared and what it noticed, beside the anomalies; no Spark in here."""

from typing import NamedTuple


class Check(NamedTuple):
    """One thing that an audit can look at."""

    what: str  # crc, queues, digests or tail
    checked: bool
    why: str | None = None  # it was not; or what limits it


class Remark(NamedTuple):
    """Something worth knowing that is no anomaly: it leaves the exit code alone."""

    kind: str  # clock_step
    offsets: list[int]  # physical
    detail: str
