"""Findings of ``halfmq store verify``."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

FINDINGS_KEPT: Final = 1000  # of each severity; the rest is counted only, which bounds memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFinding:
    """A deviation from what a sound store holds."""

    kind: str  # a word for programs; docs/store-tools.md lists all
    file: str  # relative to the store's root
    position: int | None  # of the first affected byte, in the file
    detail: str  # for people
    count: int = 1  # affected records, entries, keys, ...
    offset: int | None = None  # physical offset of the affected record, if there is one


@dataclass(slots=True)
class Findings:
    """All findings; their file names are relative to ``root``.

    Damage loses, hides or changes data. Notes need no action: the next start of a broker repairs
    what they name, or it may be in order.
    """

    root: Path
    damage: list[StoreFinding] = field(default_factory=list)
    notes: list[StoreFinding] = field(default_factory=list)
    damage_counts: Counter[str] = field(default_factory=Counter)
    note_counts: Counter[str] = field(default_factory=Counter)

    def add(
        self,
        kind: str,
        path: Path,
        detail: str,
        *,
        position: int | None = None,
        count: int = 1,
        offset: int | None = None,
        harmless: bool = False,
    ) -> None:
        """Add a finding, or only count it if there are many; with ``harmless`` as a note."""
        kept, counts = (
            (self.notes, self.note_counts) if harmless else (self.damage, self.damage_counts)
        )
        counts[kind] += count
        if len(kept) < FINDINGS_KEPT:
            kept.append(
                StoreFinding(
                    kind=kind,
                    file=self._name(path),
                    position=position,
                    detail=detail,
                    count=count,
                    offset=offset,
                )
            )

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    @property
    def sound(self) -> bool:
        return not self.damage_counts

    def as_json(self) -> dict[str, Any]:
        """Return counts by kind and the findings kept, for JSON output."""
        return {
            "damage": {
                "counts": dict(self.damage_counts),
                "findings": [asdict(one) for one in self.damage],
            },
            "notes": {
                "counts": dict(self.note_counts),
                "findings": [asdict(one) for one in self.notes],
            },
        }
