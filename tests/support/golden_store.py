"""Golden store directories, unpacked for a test together with what their JSON says of them."""

import json
import os
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent.parent / "golden" / "store"
NAMES = tuple(sorted(path.stem for path in GOLDEN.glob("*.json")))


@dataclass(frozen=True)
class GoldenStore:
    """One unpacked store; ``truth`` is the whole JSON beside it (tests/golden/store/README.md)."""

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
        """The messages in log order, also where the JSON tells them relative to another state."""
        return messages_of(self.truth)

    def segments(self) -> Iterator[tuple[int, bytes]]:
        """Give physical offset and content of each commit-log file, in order."""
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


def unpack(name: str, tmp_path: Path) -> GoldenStore:
    """Unpack one state below ``tmp_path``, its files dated now: the archives say 1970."""
    with tarfile.open(GOLDEN / f"{name}.tar.gz") as archive:
        # Before Python 3.11.4 there is no filter; what these archives hold is known.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    root = tmp_path / name
    now = time.time()
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)  # some archives carry no permissions
        os.utime(path, (now, now))
    return GoldenStore(name, root, load_truth(name))
