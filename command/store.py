"""The noun ``store`` of the command ``halfmq``: the files of a broker.

Exit codes of ``verify``: 0 sound · 1 damage found · 2 the directory cannot be read. Of the others:
0 done · 2 the directory, or the result, cannot be read or written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from halfmq.store.errors import StoreError

from .output import print_error, print_json, print_line, printable
from .verbs import USAGE, noun, reader_may_leave

if TYPE_CHECKING:  # they import numpy, for which no other verb should wait
    from halfmq.store.tools.copying import Bound, Copied
    from halfmq.store.tools.findings import StoreFinding
    from halfmq.store.tools.verify import VerifyReport

STORE: Final = noun("store", "the files of a broker, also of one that runs")

DAMAGED: Final = 1

FINDINGS_SHOWN: Final = 50
"""Findings of each severity on a screen; ``--json`` gives more."""

_MIB: Final = 1 << 20


def _offset(text: str) -> int:
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is no offset")
    return int(text)


def _bound(text: str) -> Bound:
    if text.isdecimal():
        return int(text)
    try:
        return datetime.fromisoformat(text).astimezone()  # without a zone, it is the local one
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither an offset nor a time") from None


Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="storePathRootDir", show_default=False)
]
CommitLog = Annotated[
    Path | None,
    typer.Option(
        "--commitlog", metavar="DIR", help="storePathCommitLog (default: commitlog below DIR)"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]


@contextmanager
def _readable() -> Iterator[None]:
    """End the command with one line if the directory cannot be read."""
    try:
        with reader_may_leave():
            yield
    except (StoreError, OSError) as error:
        print_error(str(error))
        raise typer.Exit(USAGE) from error


# -- verify --------------------------------------------------------------------------------------


@STORE.command("verify")
def verify_store(
    directory: Directory,
    commit_log: CommitLog = None,
    as_json: Json = False,
) -> None:
    """Check every record, queue, index file and table."""
    from halfmq.store.tools.verify import verify  # noqa: PLC0415

    with _readable():
        with _progress("verified") as progress:
            report = verify(directory, commit_log=commit_log, progress=progress)
        if as_json:
            print_json(report.as_json())
        else:
            _show(report)
    if not report.sound:
        raise typer.Exit(DAMAGED)


_STATES: Final = {
    "open": "a broker works in it: what it is about to write was left out",
    "closed": "closed in order",
    "not_closed": "not closed in order: the next start of a broker recovers it",
}


def _show(report: VerifyReport) -> None:
    findings = report.findings
    print_line(f"{report.root}: {_STATES[report.state]}")
    print_line(
        f"  log      {report.records} records in {report.log_files} files, "
        f"offsets {report.log_start} to {report.log_end}"
    )
    print_line(f"  queues   {report.queue_entries} entries in {report.queues} queues")
    print_line(
        f"  index    {report.index_items} items in {report.index_files} files"
        f"{'' if report.index_digested else ', not verified: without digests'}"
    )
    print_line(f"  tables   {report.tables}{', and a snapshot' if report.snapshot else ''}")
    _say_findings("note", findings.notes, sum(findings.note_counts.values()))
    _say_findings("DAMAGE", findings.damage, sum(findings.damage_counts.values()))
    rate = (report.log_end - report.log_start) / _MIB / max(report.elapsed, 1e-6)
    print_line(
        f"{'sound' if report.sound else 'DAMAGED'}, "
        f"after {report.elapsed:.1f} s at {rate:.0f} MiB of log per second"
    )


def _say_findings(severity: str, findings: list[StoreFinding], total: int) -> None:
    shown = findings[:FINDINGS_SHOWN]
    for one in shown:
        place = one.file if one.position is None else f"{one.file} byte {one.position}"
        times = "" if one.count == 1 else f" ({one.count})"
        print_line(f"  {severity:7}  {one.kind}{times}  {place}: {printable(one.detail)}")
    left = total - sum(one.count for one in shown)
    if left > 0:
        print_line(f"  {severity:7}  and {left} more; --json has up to 1000 lines")


# -- dump, copy and restore ------------------------------------------------------------------------


@STORE.command("dump")
def dump_log(
    directory: Directory,
    commit_log: CommitLog = None,
    topic: Annotated[str | None, typer.Option(metavar="T", help="of this topic only")] = None,
    start: Annotated[
        int | None,
        typer.Option("--from", parser=_offset, metavar="OFFSET", help="from this log offset on"),
    ] = None,
    end: Annotated[
        int | None,
        typer.Option(
            "--to", parser=_offset, metavar="OFFSET", help="records that begin before this"
        ),
    ] = None,
    bodies: Annotated[bool, typer.Option("--bodies", help="with bodies; base64 in JSON")] = False,
    as_json: Json = False,
) -> None:
    """Print records as lines, in log order."""
    from halfmq.store.log.resync import Damage  # noqa: PLC0415
    from halfmq.store.tools.dump import dump  # noqa: PLC0415

    with _readable():
        for one in dump(directory, commit_log=commit_log, topic=topic, start=start, end=end):
            if isinstance(one, Damage):
                text = f"{one.offset:>12}  DAMAGED: {one.length} bytes, {one.reason}"
                fields = {"offset": one.offset, "size": one.length, "damaged": one.reason}
            else:
                text, fields = one.as_text(body=bodies), one.as_json(body=bodies)
            print_line(json.dumps(fields) if as_json else printable(text))


@STORE.command("copy")
def copy_store(
    directory: Directory,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="directory to be made", show_default=False)
    ],
    commit_log: CommitLog = None,
    start: Annotated[
        Any,
        typer.Option(
            "--from",
            parser=_bound,
            metavar="OFFSET|TIME",
            help="from the file on that holds this log offset, or this time (2030-01-31T12:00)",
        ),
    ] = None,
    end: Annotated[
        Any,
        typer.Option(
            "--to",
            parser=_bound,
            metavar="OFFSET|TIME",
            help="records that begin before this log offset, or were stored until this time",
        ),
    ] = None,
    config: Annotated[bool, typer.Option("--config", help="the tables in config/ as well")] = False,
    queues: Annotated[bool, typer.Option("--queues", help="the consume queues as well")] = False,
    as_json: Json = False,
) -> None:
    """Copy files of the log, whole records only."""
    from halfmq.store.tools.copying import copy_log  # noqa: PLC0415

    with _readable(), _progress("copied") as progress:
        copied = copy_log(
            directory,
            target,
            commit_log=commit_log,
            start=start,
            end=end,
            with_config=config,
            with_queues=queues,
            progress=progress,
        )
    _show_copied("copied", copied, target, as_json=as_json)


def _time(text: str) -> datetime:
    bound = _bound(text)
    if isinstance(bound, int):
        raise typer.BadParameter(f"{text!r} is no time")
    return bound


@STORE.command("restore")
def restore_store(
    url: Annotated[str, typer.Argument(help="archiveUrl of the broker", show_default=False)],
    target: Annotated[
        Path, typer.Argument(metavar="DIR", help="directory to be made", show_default=False)
    ],
    end: Annotated[
        Any,
        typer.Option(
            "--to", parser=_time, metavar="TIME", help="records that were stored until this time"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a store of an archive."""
    from halfmq.store.tools.restoring import restore  # noqa: PLC0415

    with _readable(), _progress("restored") as progress:
        restored = restore(url, target, end=end, progress=progress)
    _show_copied("restored", restored, target, as_json=as_json)


def _show_copied(done: str, copied: Copied, target: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(copied, indent=None)
    else:
        print_line(
            f"{done} {copied.files} files to {target}, offsets {copied.first_offset} to "
            f"{copied.end_offset}"
        )
    if copied.damaged:
        print_error(f"{copied.damaged} damaged ranges were copied as they are")


@contextmanager
def _progress(done: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows the bytes done and the total, on a terminal."""
    shows = sys.stderr.isatty()

    def show(count: int, total: int) -> None:
        if shows:
            sys.stderr.write(f"\r{done} {count // _MIB} of {total // _MIB} MiB ")
            sys.stderr.flush()

    try:
        yield show
    finally:
        if shows:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
