"""Which anomalies a report shows, and the bytes to look at."""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ..audit.rules.model import Kind
from ..log.files import open_file
from ..log.lookup import Place
from .kinds import KINDS, Explanation
from .text import many, number

if TYPE_CHECKING:
    from ..audit.auditor import Anomaly

_BYTES_MAX: Final = 128  # of one place: the fixed fields of a record take 88, or 112 with IPv6
_LINE: Final = 8  # bytes in a line of a dump, which a phone can hold


class ShownKind(NamedTuple):
    """A kind of anomaly, and the rows of it that the report has."""

    kind: str
    about: Explanation
    found: int
    rows: list[tuple[int, "Anomaly"]]  # with their numbers

    @property
    def title(self) -> str:
        """The name of the kind in words."""
        return "CRC" if self.kind == Kind.CRC else self.kind.replace("_", " ").capitalize()

    @property
    def left_out(self) -> int:
        """How many anomalies of this kind are not shown."""
        return self.found - len(self.rows)


class Dump(NamedTuple):
    """Some bytes of a file, ready to be shown."""

    where: str
    lines: list[str]


def shown_kinds(
    anomalies: Sequence["Anomaly"], counts: Mapping[str, int], most: int
) -> list[ShownKind]:
    """Select up to ``most`` rows of each kind, so that one kind does not hide another."""
    shown: list[ShownKind] = []
    first = 1
    for kind in Kind:
        if counts.get(kind):
            rows = list(islice((one for one in anomalies if one.kind == kind), most))
            shown.append(
                ShownKind(str(kind), KINDS[kind], counts[kind], list(enumerate(rows, first)))
            )
            first += len(rows)
    return shown


def dump(place: Place) -> Dump:
    """Read the first bytes of a place; a file that is gone is said to be gone."""
    size = f"{number(place.size)} bytes" if place.size else "no record begins here"
    where = f"{Path(place.file).name} at {place.position}, {size}"
    wanted = min(place.size or _BYTES_MAX, _BYTES_MAX)
    try:
        with open_file(place.file) as file:
            content = bytes(file.read_at(wanted, place.position))
    except OSError as error:  # deleted since, for one
        return Dump(where, [error.strerror or str(error)])
    lines = [_line(at, content[at : at + _LINE]) for at in range(0, len(content), _LINE)]
    if place.size > len(content):
        lines.append(f"… {many(place.size - len(content), 'more byte')}")
    return Dump(where, lines)


def _line(at: int, content: bytes) -> str:
    letters = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in content)
    return f"{at:4x}  {content.hex(' '):{3 * _LINE - 1}}  {letters}"
