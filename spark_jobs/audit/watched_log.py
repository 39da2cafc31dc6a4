"""What a watch knows of the log as a whole: the notes of all its batches, folded. No Spark in here.

An audit has the notes of a whole log at once; a watch would have ever more of them. So what follows
each other without a step or a hole is one note here, with the same meaning to the rules.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from halfmq.store.format.topics import HALF_TOPIC

from ..log.hashes import hash_of
from ..log.segments import LogExtent, Segment
from ..log.store_files import StoreFiles
from ..source import scan
from ..source.events import MARK, ends_of_marks
from .checks import Checks
from .rules.model import LogBounds
from .scan_summary import ScanSummary, smoothed

NoteFields = Mapping[str, Any]
_COUNTED: Final = (scan.DELAYS, scan.KEYLESS)  # of one scan; a watch judges without them


@dataclass
class WatchedLog:
    """The log up to the end of a batch."""

    end_offset: int = 0
    segments: dict[str, tuple[str, int]] = field(default_factory=dict)  # by base: path, bytes
    notes: list[NoteFields] = field(default_factory=list)  # without those of queues
    last_in_queues: dict[str, dict[str, int]] = field(default_factory=dict)  # by topic and queue
    half_ranges: list[NoteFields] = field(default_factory=list)  # of the half topic's queues
    judged_by: str = ""  # see ``rules_change``

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what ``save`` wrote."""
        return cls(**json.loads(path.read_text("utf-8")))

    def save(self, path: Path) -> None:
        """Write it to a file; the folder is there."""
        path.write_text(json.dumps(asdict(self)), "utf-8")

    def add(self, notes: Iterable[NoteFields], segments: Iterable[Segment], end: int) -> None:
        """Take in the notes of the next batch, which reaches up to an offset."""
        self.end_offset = end
        for one in segments:
            if one.base < end:
                self.segments[str(one.base)] = (one.path, one.size)
        ranges = []
        for note in notes:
            if note["what"] == scan.QUEUE:
                ranges.append(note)
            elif note["what"] not in _COUNTED:
                self.notes.append(note)
        self.notes = list(_folded(self.notes))
        for note in ranges:
            queues = self.last_in_queues.setdefault(note["topic"], {})
            queue, last = str(note["partition"]), note["lastPhysicalOffset"]
            queues[queue] = max(queues.get(queue, 0), last)
        self.half_ranges += [one for one in ranges if one["topic"] == HALF_TOPIC]

    @property
    def extent(self) -> LogExtent:
        """The segments that were read, of which some may be deleted by now."""
        segments = [Segment(int(base), *rest) for base, rest in self.segments.items()]
        return LogExtent(tuple(sorted(segments)), self.end_offset, None)

    def summary(self, store: StoreFiles, checks: Checks) -> ScanSummary:
        """Return the notes as an audit has them; joins the ranges of half queues by the way."""
        summary = ScanSummary(self.notes, self.extent, store, checks)
        self.half_ranges = list(_joined(self.half_ranges, summary.bounds))
        return summary

    def bounds(self, summary: ScanSummary) -> LogBounds:
        """Return the bounds of ``summary``, and, where no store tells, which queues there were."""
        bounds = summary.bounds
        if bounds.write_queues is not None:
            return bounds
        last = {
            hash_of(topic): [(int(queue), last) for queue, last in queues.items()]
            for topic, queues in self.last_in_queues.items()
        }
        return bounds._replace(last_in_queues=last)

    def rules_change(self, bounds: LogBounds) -> bool:
        """Tell whether decided groups must be judged again: another broker wrote than was thought.

        All else that comes to be known of the log matters to open groups only.
        """
        before, self.judged_by = self.judged_by, repr(bounds.records_rollbacks)
        return before not in {"", self.judged_by}


def _folded(notes: Sequence[NoteFields]) -> Iterable[NoteFields]:
    in_order = sorted(notes, key=lambda note: int(note["physicalOffset"]))
    marks = [
        (note["physicalOffset"], bool(note["records"]), bool(note["sum"]))
        for note in in_order
        if note["what"] == scan.MARK
    ]
    yield from (note for note in in_order if note["what"] not in {scan.MARK, scan.RECORDS})
    ranges = [note for note in in_order if note["what"] == scan.RECORDS]
    # What the time of the last record is worth is known when there is a next one.
    waiting = ranges[-1:] if ranges and ranges[-1]["records"] == 1 else []
    records: list[NoteFields] = []
    for note in smoothed(ranges)[: len(ranges) - len(waiting)]:
        if not records or records[-1]["lastTime"] - note["time"] >= scan.CLOCK_STEP_MIN:
            records.append(note)
            continue
        before = records[-1]
        if note["time"] - before["lastTime"] >= scan.PAUSE_MIN:
            pause = scan.Note(scan.PAUSE, time=before["lastTime"], lastTime=note["time"])
            yield pause._asdict()
        sums = {name: before[name] + note[name] for name in ("records", "sum")}
        ends = {name: note[name] for name in ("lastPhysicalOffset", "lastTime")}
        records[-1] = {**before, **sums, **ends}
    yield from waiting
    yield from records
    for at, is_ours, is_final in ends_of_marks(np.array(marks, dtype=MARK)).tolist():
        mark = scan.Note(scan.MARK, physicalOffset=at, records=int(is_ours), sum=int(is_final))
        yield mark._asdict()


def _joined(ranges: Sequence[NoteFields], bounds: LogBounds) -> Iterable[NoteFields]:
    """Join ranges of a queue between which all of the log can be read."""
    joined: dict[int, NoteFields] = {}
    for note in sorted(ranges, key=lambda note: int(note["physicalOffset"])):
        before = joined.pop(note["partition"], None)
        if before is None:
            joined[note["partition"]] = note
        elif bounds.hides(before["lastPhysicalOffset"] + 1, note["physicalOffset"]):
            yield before
            joined[note["partition"]] = note
        else:
            joined[note["partition"]] = {
                **before,
                "offset": min(before["offset"], note["offset"]),
                "endOffset": max(before["endOffset"], note["endOffset"]),
                "lastPhysicalOffset": note["lastPhysicalOffset"],
            }
    yield from joined.values()
