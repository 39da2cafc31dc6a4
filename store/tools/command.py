"""``halfmq store``: commands for the files of a broker.

Exit codes of ``verify``: 0 sound · 1 damage found · 2 the directory cannot be read. Of the others:
0 done · 2 the directory, or the result, cannot be read or written.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

from ..errors import StoreError
from ..log.resync import Damage
from .copying import Bound, copy_log
from .dump import Dumped, dump
from .findings import StoreFinding
from .verify import VerifyReport, verify

DONE: Final = 0
SOUND: Final = 0
DAMAGED: Final = 1
UNREADABLE: Final = 2

FINDINGS_SHOWN: Final = 50
"""Findings of each severity on a screen; ``--json`` gives more."""

_MIB: Final = 1 << 20

Verb: TypeAlias = Callable[[argparse.Namespace], int]


def add_nouns(nouns: Any) -> None:
    """Add the noun to the command's parser; the options parsed then have a ``run``."""
    store = nouns.add_parser("store", help="the files of a broker, also of one that runs")
    verbs = store.add_subparsers(metavar="VERB", required=True)
    _verb(verbs, "verify", _verify, "check every record, queue, index file and table")
    dumping = _verb(verbs, "dump", _dump, "print records as lines, in log order")
    dumping.add_argument("--topic", metavar="T", help="of this topic only")
    dumping.add_argument(
        "--from", type=_offset, dest="start", metavar="OFFSET", help="from this log offset on"
    )
    dumping.add_argument(
        "--to", type=_offset, dest="end", metavar="OFFSET", help="records that begin before this"
    )
    dumping.add_argument("--bodies", action="store_true", help="with bodies; base64 in JSON")
    copying = _verb(verbs, "copy", _copy, "copy files of the log, whole records only")
    copying.add_argument("target", type=Path, metavar="TARGET", help="directory to be made")
    copying.add_argument(
        "--from",
        type=_bound,
        dest="start",
        metavar="OFFSET|TIME",
        help="from the file on that holds this log offset, or this time (2030-01-31T12:00)",
    )
    copying.add_argument(
        "--to",
        type=_bound,
        dest="end",
        metavar="OFFSET|TIME",
        help="records that begin before this log offset, or were stored until this time",
    )
    copying.add_argument("--config", action="store_true", help="the tables in config/ as well")
    copying.add_argument("--queues", action="store_true", help="the consume queues as well")


def _verb(verbs: Any, name: str, verb: Verb, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="storePathRootDir")
    parser.add_argument(
        "--commitlog",
        type=Path,
        metavar="DIR",
        help="storePathCommitLog (default: commitlog below DIR)",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(verb=verb, run=run)
    return parser


def _offset(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no offset")
    return int(text)


def _bound(text: str) -> Bound:
    if text.isdecimal():
        return int(text)
    try:
        return datetime.fromisoformat(text).astimezone()  # without a zone, it is the local one
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither an offset nor a time") from None


def run(options: argparse.Namespace) -> int:
    """Run the chosen verb and return the exit code."""
    verb: Verb = options.verb
    try:
        return verb(options)
    except BrokenPipeError:
        raise
    except (StoreError, OSError) as error:
        sys.stdout.flush()
        sys.stderr.write(f"halfmq: {error}\n")
        return UNREADABLE


# -- verify --------------------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> int:
    progress = _Progress("verified")
    try:
        report = verify(
            options.directory,
            commit_log=options.commitlog,
            progress=progress.show,
        )
    finally:
        progress.end()
    if options.json:
        _say(json.dumps(report.as_json(), indent=2))
    else:
        _show(report)
    return SOUND if report.sound else DAMAGED


_STATES: Final = {
    "open": "a broker works in it: what it is about to write was left out",
    "closed": "closed in order",
    "not_closed": "not closed in order: the next start of a broker recovers it",
}


def _show(report: VerifyReport) -> None:
    findings = report.findings
    _say(f"{report.root}: {_STATES[report.state]}")
    _say(
        f"  log      {report.records} records in {report.log_files} files, "
        f"offsets {report.log_start} to {report.log_end}"
    )
    _say(f"  queues   {report.queue_entries} entries in {report.queues} queues")
    _say(
        f"  index    {report.index_items} items in {report.index_files} files"
        f"{'' if report.index_digested else ', not verified: without digests'}"
    )
    _say(f"  tables   {report.tables}{', and a snapshot' if report.snapshot else ''}")
    _say_findings("note", findings.notes, sum(findings.note_counts.values()))
    _say_findings("DAMAGE", findings.damage, sum(findings.damage_counts.values()))
    rate = (report.log_end - report.log_start) / _MIB / max(report.elapsed, 1e-6)
    _say(
        f"{'sound' if report.sound else 'DAMAGED'}, "
        f"after {report.elapsed:.1f} s at {rate:.0f} MiB of log per second"
    )


def _say_findings(severity: str, findings: list[StoreFinding], total: int) -> None:
    shown = findings[:FINDINGS_SHOWN]
    for one in shown:
        place = one.file if one.position is None else f"{one.file} byte {one.position}"
        times = "" if one.count == 1 else f" ({one.count})"
        _say(f"  {severity:7}  {one.kind}{times}  {place}: {_printable(one.detail)}")
    left = total - sum(one.count for one in shown)
    if left > 0:
        _say(f"  {severity:7}  and {left} more; --json has up to 1000 lines")


# -- dump and copy -------------------------------------------------------------------------------


def _dump(options: argparse.Namespace) -> int:
    found = dump(
        options.directory,
        commit_log=options.commitlog,
        topic=options.topic,
        start=options.start,
        end=options.end,
    )
    for one in found:
        if options.json:
            _say(json.dumps(_range_json(one) if isinstance(one, Damage) else _record(one, options)))
        elif isinstance(one, Damage):
            _say(f"{one.offset:>12}  DAMAGED: {one.length} bytes, {one.reason}")
        else:
            _say(_printable(one.as_text(body=options.bodies)))
    return DONE


def _record(one: Dumped, options: argparse.Namespace) -> dict[str, Any]:
    return one.as_json(body=options.bodies)


def _range_json(damaged: Damage) -> dict[str, Any]:
    return {"offset": damaged.offset, "size": damaged.length, "damaged": damaged.reason}


def _copy(options: argparse.Namespace) -> int:
    progress = _Progress("copied")
    try:
        copied = copy_log(
            options.directory,
            options.target,
            commit_log=options.commitlog,
            start=options.start,
            end=options.end,
            with_config=options.config,
            with_queues=options.queues,
            progress=progress.show,
        )
    finally:
        progress.end()
    if options.json:
        _say(json.dumps(asdict(copied)))
    else:
        _say(
            f"copied {copied.files} files to {options.target}, offsets {copied.first_offset} to "
            f"{copied.end_offset}"
        )
    if copied.damaged:
        sys.stderr.write(f"halfmq: {copied.damaged} damaged ranges were copied as they are\n")
    return DONE


class _Progress:
    """Progress of a long command, shown only on a terminal."""

    def __init__(self, done: str) -> None:
        self._done = done
        self._shown = False

    def show(self, done: int, total: int) -> None:
        """Show the bytes done and the total."""
        if sys.stderr.isatty():
            self._shown = True
            sys.stderr.write(f"\r{self._done} {done // _MIB} of {total // _MIB} MiB ")
            sys.stderr.flush()

    def end(self) -> None:
        """Clear the line."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _printable(text: str) -> str:
    """Escape names chosen by others, such as topics, so that they cannot control the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
