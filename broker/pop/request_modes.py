"""Whether a group pulls or pops a topic, as operators have set it, in `messageRequestMode.json`.

Source: RocketMQ `MessageRequestModeManager`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.pop import RequestMode

from ..errors import RequestRefusedError
from ..limits.kept import REQUEST_MODES, Kept
from ..tables.table_file import JsonObject, TableFile, as_object

_KEY: Final = "messageRequestModeMap"
_Modes = Mapping[tuple[str, str], RequestMode]  # topic and group


class RequestModes:
    """The modes; a change takes effect when it is on disk."""

    def __init__(self, path: Path, now_ms: Callable[[], int]) -> None:
        self._file = TableFile(
            path, now_ms, table_key=_KEY, if_removed="consumers that ask the broker pull again"
        )
        self._modes: _Modes = {}

    def load(self) -> None:
        """Read the file; raise what ``TableFile.load`` raises."""
        self._modes = {
            (topic, group): msgspec.convert(mode, RequestMode)
            for topic, groups in as_object(self._file.load().get(_KEY)).items()
            for group, mode in as_object(groups).items()
        }

    def get(self, topic: str, group: str) -> RequestMode:
        """Return the mode of a group for a topic; a group pulls unless it is set otherwise."""
        return self._modes.get((topic, group)) or RequestMode(group, topic)

    async def put(self, mode: RequestMode) -> None:
        """Set the mode of a group for a topic.

        Raises:
            RequestRefusedError: There are too many, or it cannot be saved.
        """
        modes = {**self._modes, (mode.topic, mode.consumer_group): mode}
        if len(modes) > REQUEST_MODES.most:
            raise RequestRefusedError(
                f"no further mode can be kept: the limit is {REQUEST_MODES.most}",
                ResponseCode.NO_PERMISSION,
            )
        self._file.next_version()
        content = _content(modes)
        await self._file.save_on_thread(lambda: content)
        self._modes = modes

    def encoded(self) -> bytes:
        """Return all modes as RocketMQ writes them."""
        return msgspec.json.encode(_content(self._modes))

    def kept(self) -> Kept:
        return {REQUEST_MODES: len(self._modes)}


def _content(modes: _Modes) -> JsonObject:
    tables: dict[str, dict[str, object]] = {}
    for (topic, group), mode in modes.items():
        tables.setdefault(topic, {})[group] = msgspec.to_builtins(mode)
    return {_KEY: tables}
