"""Golden store directories, unpacked for a test, and the JSON that describes them."""

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent.parent / "golden" / "store"
NAMES = tuple(sorted(path.stem for path in GOLDEN.glob("*.json")))


@dataclass(frozen=True)
class GoldenStore:
    """One unpacked store; ``truth`` is its JSON (tests/golden/store/README.md)."""

    name: str
    root: Path
    truth: dict[str, Any]

    @property
    def commit_log_file_size(self) -> int:
        return int(self.truth["broker_config"]["mappedFileSizeCommitLog"])

    @property
    def index_sizes(self) -> tuple[int, int]:
        """Slots and item numbers of an index file."""
        config = self.truth["broker_config"]
        return int(config["maxHashSlotNum"]), int(config["maxIndexNum"])

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages in log order, also if the JSON gives them relative to another state."""
        return messages_of(self.truth)

    def segments(self) -> Iterator[tuple[int, bytes]]:
        """Yield physical offset and content of each commit-log file, in order."""
        for path in sorted((self.root / "commitlog").iterdir()):
            yield int(path.name), path.read_bytes()


def load_truth(name: str) -> dict[str, Any]:
    """Load the JSON of a state without unpacking its files."""
    truth: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return truth


def messages_of(truth: dict[str, Any]) -> list[dict[str, Any]]:
    """Resolve ``messages_of``, ``messages_without`` and ``messages_also``."""
    if "messages_of" not in truth:
        messages: list[dict[str, Any]] = truth["messages"]
        return messages
    without = set(truth.get("messages_without", ()))
    base = messages_of(load_truth(truth["messages_of"]))
    kept = [message for message in base if message["commitLogOffset"] not in without]
    also: list[dict[str, Any]] = truth.get("messages_also", [])
    return sorted(kept + also, key=lambda message: int(message["commitLogOffset"]))


@cache
def _contents(name: str) -> tuple[list[Path], list[tuple[str, bytes, int]]]:
    """Folders; and path, content without its zeros at the end, and size of each file.

    Kept for the process: a hundred tests unpack the same two dozen archives.
    """
    folders: set[Path] = set()
    files: list[tuple[str, bytes, int]] = []
    with tarfile.open(GOLDEN / f"{name}.tar.gz") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            folders.add(Path(member.name) if file is None else Path(member.name).parent)
            if file is not None:
                files.append((member.name, file.read().rstrip(b"\0"), member.size))
    return sorted(folders), files


def unpack(name: str, tmp_path: Path) -> GoldenStore:
    """Unpack one state below ``tmp_path``, its files dated now: the archives say 1970."""
    folders, files = _contents(name)
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for path, content, size in files:
        with (tmp_path / path).open("wb") as file:
            file.write(content)
            file.truncate(size)
    return GoldenStore(name, tmp_path / name, load_truth(name))
