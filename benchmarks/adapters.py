"""What a message costs a database transaction, by each adapter and beside the same plain SQL.

::

    python -m benchmarks.adapters --postgresql URL --mariadb URL

A URL is ``postgresql://postgres@127.0.0.1:5432/postgres`` or ``mysql://root@127.0.0.1:3306``, whose
database ``test`` is used.

A transaction inserts one row into a table of orders; with halfmq it also publishes a message of
256 bytes. One after the other, in one program, which takes turns with plain SQL. Without a URL the
rows of that database are left out; SQLite needs none. The broker flushes before it answers
(``SYNC_FLUSH``); the databases have the settings they have.

The table has medians over the rounds. Processor time is the program's and, beside it, the broker's;
that of the database server is not in it. All figures go to ``--output``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec

from .build import cache_directory
from .machine import describe_machine
from .python_peers import cpu_of, halfmq
from .report import table

SQLITE: Final = "SQLite"
POSTGRESQL: Final = "PostgreSQL"
MARIADB: Final = "MariaDB"

ADAPTERS: Final[Mapping[str, str]] = {
    "sqlite3": SQLITE,
    "psycopg": POSTGRESQL,
    "asyncpg": POSTGRESQL,
    "PyMySQL": MARIADB,
    "aiomysql": MARIADB,
    "Session, psycopg": POSTGRESQL,
    "AsyncSession, asyncpg": POSTGRESQL,
    "AsyncSession, aiosqlite": SQLITE,
    "Django": POSTGRESQL,
    "inbox, sqlite3": SQLITE,
    "inbox, psycopg": POSTGRESQL,
    "inbox, asyncpg": POSTGRESQL,
}
"""The programs of ``adapter_programs``, and the database of each."""

WAYS: Final[Mapping[str, str]] = {
    "halfmq": "session=",
    "by hand": "ledger.record, own commit",
    "celery": "delay_on_commit",
    "faststream": "broker.transaction",
}


@dataclass(frozen=True)
class Figure:
    """What one round of one way took, per transaction."""

    adapter: str
    way: str
    wall_us: float
    cpu_us: float


def measure(adapter: str, url: str, count: int, rounds: int, base: Path) -> Iterator[Figure]:
    """Run one program beside a broker of its own."""
    with (
        tempfile.TemporaryDirectory(dir=base) as home,
        halfmq(Path(home), durable=True) as (namesrv, pid),
    ):
        url = url or f"sqlite:///{home}/orders.db"
        program = [sys.executable, "-m", "benchmarks.adapter_programs"]
        before = cpu_of(pid)
        done = subprocess.run(
            [*program, adapter, namesrv, url, str(count), str(rounds)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        ways = set()
        for line in done.stdout.splitlines():
            way, wall, cpu = line.rsplit(maxsplit=2)
            ways.add(way)
            yield Figure(adapter, way, float(wall) * 1e6 / count, float(cpu) * 1e6 / count)
        with_message = (len(ways) - 1) * rounds * count
        broker_us = (cpu_of(pid) - before) * 1e6 / with_message
        yield Figure(adapter, "broker", 0.0, broker_us)


def summary(figures: Sequence[Figure]) -> list[list[str]]:
    """Return the rows of the table: medians, and what the message adds."""
    found: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for one in figures:
        found[one.adapter, one.way].append(one)
    rows = []
    for (adapter, way), own in found.items():
        if way in ("plain", "broker"):
            continue
        plain = found[adapter, "plain"]
        plain_us, own_us = (statistics.median(one.cpu_us for one in some) for some in (plain, own))
        walls = (statistics.median(one.wall_us for one in some) for some in (plain, own))
        receives = adapter.startswith("inbox")
        rows.append(
            [
                adapter,
                "consumer.inbox" if receives else WAYS[way],
                ADAPTERS[adapter],
                *(f"{us:,.0f}" for us in (plain_us, own_us, own_us - plain_us)),
                "" if receives else f"{found[adapter, 'broker'][0].cpu_us:,.0f}",
                *(f"{us:,.0f}" for us in walls),
            ]
        )
    return rows


HEAD: Final = (
    *("adapter", "way", "database", "plain CPU us", "CPU us", "more", "broker CPU us"),
    *("plain wall us", "wall us"),
)


def main() -> None:
    """Measure, print the table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=300, help="transactions of a round")
    parser.add_argument("--postgresql", metavar="URL")
    parser.add_argument("--mariadb", metavar="URL")
    parser.add_argument("--adapter", action="append", choices=list(ADAPTERS))
    parser.add_argument("--output", type=Path, default=Path("adapters.json"))
    options = parser.parse_args()
    urls = {SQLITE: "", POSTGRESQL: options.postgresql, MARIADB: options.mariadb}
    figures: list[Figure] = []
    base = cache_directory()
    for adapter, database in ADAPTERS.items():
        url = urls[database]
        if url is not None and (not options.adapter or adapter in options.adapter):
            print(adapter, file=sys.stderr)
            figures += measure(adapter, url, options.count, options.rounds, base)
    print(table(HEAD, summary(figures)))
    content = {
        "machine": msgspec.to_builtins(describe_machine(base)),
        "figures": [asdict(one) for one in figures],
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
