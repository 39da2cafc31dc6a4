r"""The broker's tables in ``config/*.json``: tolerant loading, and saving that survives crashes.

RocketMQ writes these files with fastjson, which leaves integer map keys unquoted. That is not valid
JSON, but it is accepted here. halfmq writes plain JSON in RocketMQ's layout (tab indent, no
blanks), which RocketMQ can read.

A readable copy exists at every moment of a save:

1. the new content is written to ``<name>.tmp`` and flushed
2. the old file becomes ``<name>.bak`` through a second link, so that it also keeps its own name
3. ``<name>.tmp`` is renamed to ``<name>``, and the directory is flushed

A crash before 3 leaves the old table, a crash after it the new one. Only a *readable* old file
becomes the backup; a damaged one would push out the last good copy.

Loading never returns an empty table for a damaged one. If the file is damaged, its backup is used
and the log says so; if that is damaged too, the caller has to decide (``DamagedTableError``).

Source: RocketMQ ``ConfigManager.java``, ``MixAll.java``; fastjson 1.2.83.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from sys import intern
from time import sleep
from typing import Any, Final, NamedTuple

import msgspec

from ..errors import DamagedTableError, UnusableFileError
from . import disk

_log = logging.getLogger(__name__)

_PIECE_SIZE: Final = 6_000  # characters between two pauses; takes half a millisecond
_PAUSE: Final = 0.001  # seconds
SORTED_MAX: Final = 4_096  # entries; sorting more holds the interpreter for over a millisecond
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_ENTRY_INDENT: Final = "\n\t\t"
_NAME: Final = "\0"  # stands for an entry's own name in its text; JSON has it as an escape only
_ENTRIES_PER_PAUSE: Final = 24  # of a patient ``EntryTexts``; encoding them takes a third of a ms
# A string, or an integer in place of an object key. Strings are matched so that they are skipped.
_STRING_OR_BARE_KEY: Final = re.compile(r'("(?:[^"\\]|\\.)*")|([{,]\s*)(-?\d+)(\s*:)')


class TableOrigin(Enum):
    """Where a table came from."""

    FILE = "the file"
    BACKUP = "its .bak"  # it lacks the last change
    NOTHING = "nothing"  # neither is there


class LoadedTable(NamedTuple):
    """A table with keys as strings; empty if there is no file."""

    content: dict[str, Any]
    origin: TableOrigin


def read_table(path: Path, holds: str | None = None) -> LoadedTable:
    """Read the table kept at ``path``, or its ``.bak`` if the file is missing or damaged.

    A table without an object under the key ``holds`` counts as damaged; otherwise one flipped bit
    in that key would turn it into an empty table. A damaged file is never deleted: after its
    ``.bak`` was read, it is renamed to ``<name>.bad`` so that it can be inspected.

    Raises:
        DamagedTableError: Files exist, but none can be read. They stay as they are, so that the
            next attempt does not find nothing and return an empty table.
        UnusableFileError: The system refuses to read the file.
    """
    backup_path = _beside(path, ".bak")
    table = _read(path, holds)
    if isinstance(table, dict):
        return LoadedTable(table, TableOrigin.FILE)
    backup = _read(backup_path, holds)
    if table is None and backup is None:
        return LoadedTable({}, TableOrigin.NOTHING)
    reason = "it is missing" if table is None else table
    if not isinstance(backup, dict):
        raise DamagedTableError(path, f"{reason}; .bak: {backup or 'it is missing'}")
    if table is not None:
        disk.replace(path, _beside(path, ".bad"))
    _log.log(
        logging.WARNING if table is None else logging.ERROR,
        "event=table_not_readable path=%s reason=%r instead=.bak lost='its last change' "
        "damaged_file=%s",
        path,
        reason,
        "missing" if table is None else "kept as .bad",
    )
    return LoadedTable(backup, TableOrigin.BACKUP)


def set_aside(path: Path) -> None:
    """Rename a damaged table and its damaged ``.bak`` to ``.bad``, after they were rebuilt."""
    for damaged in (path, _beside(path, ".bak")):
        if disk.exists(damaged):
            disk.replace(damaged, _beside(damaged, ".bad"))


def save_table(
    path: Path, table: Mapping[str, Any], *, patient: bool = False, private: bool = False
) -> None:
    """Replace the table at ``path`` and keep the old one as ``.bak``; waits for the disk.

    With ``patient``, other threads run in between; see ``encode_table``. With ``private``, only the
    owner can read the file.

    Raises:
        OSError: The table could not be written; the old one is still there.
        TypeError: The table holds a value that JSON cannot express; nothing was changed.
        ValueError: The table holds text that is not Unicode, or NaN; nothing was changed.
    """
    content = encode_table(table, patient=patient)
    new = _beside(path, ".tmp")
    disk.remove(new)  # one left by a crash would keep its mode, and may be a link
    disk.write_file(new, content, sync=True, mode=disk.PRIVATE_MODE if private else disk.MODE)
    _keep_as_backup(path)
    disk.replace(new, path)
    disk.sync_directory(path.parent)


def encode_table(table: Mapping[str, Any], *, patient: bool = False) -> bytes:
    """Return the file content: tab-indented and in alphabetical order, as RocketMQ prints it.

    With ``patient``, for a helper thread, other threads get the interpreter every half millisecond.
    A table of very many entries is not sorted.
    """
    pieces: list[bytes] = []
    size = 0
    for piece in _pieces(table):
        pieces.append(piece.encode())
        size += len(piece)
        if patient and size >= _PIECE_SIZE:
            size = 0
            sleep(_PAUSE)
    return b"".join(pieces)


class Encoded(str):
    """JSON text in the file's layout, which ``encode_table`` takes over as it is."""

    __slots__ = ()


class EntryTexts:
    """The entries of one table as JSON text; an entry is encoded once, not in each save.

    Entries must be immutable objects: one that has changed is another object.
    """

    def __init__(self, to_json: Callable[[Any], Mapping[str, object]]) -> None:
        self._to_json = to_json
        # By name, with the entry they are of. Usual entries differ by their names alone, so that
        # they share one text, of 300 bytes.
        self._texts: dict[str, tuple[object, str]] = {}

    def encode(self, entries: Mapping[str, object], *, patient: bool = False) -> Encoded:
        """Return the table as a value for ``encode_table``; ``patient`` has the same meaning.

        One thread at a time may call this.
        """
        before, now = self._texts, dict[str, tuple[object, str]]()
        lines = []
        encoded = 0
        for name in sorted(entries) if len(entries) <= SORTED_MAX else entries:
            entry, key = entries[name], _key(name)
            known = before.get(name)
            if known is None or known[0] is not entry:
                text = f"{_ENTRY_INDENT}{key}:{_text(self._to_json(entry), _ENTRY_INDENT)}"
                known = entry, intern(text.replace(key, _NAME))
                encoded += 1
                if patient and encoded % _ENTRIES_PER_PAUSE == 0:
                    sleep(_PAUSE)
            now[name] = known
            lines.append(known[1].replace(_NAME, key))
        self._texts = now
        return Encoded(f"{{{','.join(lines)}\n\t}}" if lines else "{}")


def _pieces(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text entry by entry; each entry is read when it is due."""
    before = "{"
    for name in sorted(table):
        value = table[name]
        yield f"{before}\n\t{_key(name)}:"
        before = ","
        if isinstance(value, Mapping) and len(value) > 0:
            inner_before = "{"
            for key in sorted(value) if len(value) <= SORTED_MAX else value:
                yield f"{inner_before}\n\t\t{_key(key)}:{_text(value[key], _ENTRY_INDENT)}"
                inner_before = ","
            yield "\n\t}"
        elif isinstance(value, Encoded):
            yield value
        else:
            yield _text(value, "\n\t")
    yield "\n}" if table else "{}"


def _text(value: object, indent: str) -> str:
    """Return the text of a value; ``indent`` is a line break and the tabs of the value's line.

    The standard encoder with an indent creates thirty objects in a reference cycle per call, which
    caused a full garbage collection every half second while topics were created.
    """
    inner = indent + "\t"
    if isinstance(value, Mapping) and value:
        lines = [f"{inner}{_key(key)}:{_text(value[key], inner)}" for key in sorted(value)]
        return f"{{{','.join(lines)}{indent}}}"
    if isinstance(value, list | tuple) and value:
        return f"[{','.join([inner + _text(one, inner) for one in value])}{indent}]"
    if type(value) is int:  # mostly offsets; the encoder takes a microsecond for each
        return str(value)
    return _ENCODER.encode(value)


def _key(key: object) -> str:
    text = _ENCODER.encode(key)
    return text if isinstance(key, str) else f'"{text}"'


def decode_table(content: bytes) -> dict[str, Any]:
    """Parse JSON, or fastjson's variant in which integer keys have no quotes.

    Raises:
        ValueError: The content is neither, or not an object.
    """
    try:
        table = msgspec.json.decode(content)  # a third of the time of ``json``
    except msgspec.DecodeError:
        table = json.loads(_STRING_OR_BARE_KEY.sub(_quote, content.decode()))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(table, dict):
        raise ValueError(f"expected an object, found {type(table).__name__}")  # noqa: TRY004
    return table


def _quote(match: re.Match[str]) -> str:
    string, before, key, after = match.groups()
    return string or f'{before}"{key}"{after}'


def _read(path: Path, holds: str | None = None) -> dict[str, Any] | str | None:
    """Return the table; None if there is no file; if it is damaged, the reason as text."""
    try:
        content = disk.read_bytes(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnusableFileError(path, error.strerror or str(error)) from error
    try:
        table = decode_table(content)
    except ValueError as error:
        return f"{error} ({len(content)} bytes)"
    if holds is not None and not isinstance(table.get(holds), dict):
        return f"it holds no {holds}"
    return table


def _keep_as_backup(path: Path) -> None:
    """Link the old table as ``.bak``; without hard links, rename it."""
    if not _is_readable(path):
        return
    link = _beside(path, ".bak.tmp")  # a link cannot replace an existing .bak
    disk.remove(link)
    try:
        disk.link(path, link)
    except OSError as error:
        _log.debug("event=no_hard_links path=%s reason=%r", path, str(error))
        link = path
    disk.replace(link, _beside(path, ".bak"))


def _is_readable(path: Path) -> bool:
    try:
        content = disk.read_bytes(path)
    except FileNotFoundError:
        return False
    try:
        # halfmq writes strict JSON; checking it without building objects costs microseconds.
        content.decode()
        msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except (UnicodeDecodeError, msgspec.DecodeError):
        return isinstance(_read(path), dict)  # fastjson's variant, before the first save by halfmq
    return True


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
