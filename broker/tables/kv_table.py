"""Settings that operators keep with the name server, by namespace and key, in `kvConfig.json`.

RocketMQ's tools keep the order of ordered topics there (namespace `ORDER_TOPIC_CONFIG`).
Source: RocketMQ `KVConfigManager`, `KVConfigSerializeWrapper`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from halfmq.remoting.codes import ResponseCode

from ..errors import RequestRefusedError
from ..limits.kept import KV_CHARACTERS, Kept
from .table_file import JsonObject, TableFile, as_object

Table = Mapping[str, Mapping[str, str]]


class KvConfig:
    """The settings; a change takes effect when it is on disk."""

    def __init__(self, path: Path, now_ms: Callable[[], int]) -> None:
        self._file = TableFile(
            path,
            now_ms,
            table_key="configTable",
            if_removed="what operators set with updateKvConfig is lost",
        )
        self._table: Table = {}

    def load(self) -> None:
        """Read the file; raise what ``TableFile.load`` raises."""
        found = as_object(self._file.load().get("configTable"))
        self._table = {
            namespace: {key: str(value) for key, value in as_object(values).items()}
            for namespace, values in found.items()
        }

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> Mapping[str, str] | None:
        """Return the values of a namespace; None if it never had any."""
        return self._table.get(namespace)

    async def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value.

        Raises:
            RequestRefusedError: There are too many, or it cannot be saved.
        """
        table = {**self._table, namespace: {**self._table.get(namespace, {}), key: value}}
        size = _size(table)
        if size > KV_CHARACTERS.most:
            raise RequestRefusedError(
                f"all KV configuration would have {size} characters, "
                f"the limit is {KV_CHARACTERS.most}",
                ResponseCode.NO_PERMISSION,
            )
        await self._save(table)

    async def delete(self, namespace: str, key: str) -> None:
        """Remove a value; an unknown one is no error.

        Raises:
            RequestRefusedError: It cannot be saved.
        """
        values = dict(self._table.get(namespace, {}))
        if values.pop(key, None) is not None:
            await self._save({**self._table, namespace: values})

    async def _save(self, table: Table) -> None:
        self._file.next_version()
        content: JsonObject = {"configTable": table}
        await self._file.save_on_thread(lambda: content)
        self._table = table

    def kept(self) -> Kept:
        return {KV_CHARACTERS: _size(self._table)}


def _size(table: Mapping[str, Mapping[str, str]]) -> int:
    """Return the characters of all namespaces, keys and values."""
    return sum(
        len(name) + sum(len(one) + len(text) for one, text in values.items())
        for name, values in table.items()
    )
