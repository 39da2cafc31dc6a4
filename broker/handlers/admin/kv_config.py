"""The name server's KV configuration: put, get, delete, list (100 to 102, 219).

Source: RocketMQ 5.3.3 `DefaultRequestProcessor` of the name server.
"""

from __future__ import annotations

from functools import partial

from halfmq.remoting.admin_headers import (
    GetKVConfigResponseHeader,
    GetKVListByNamespaceRequestHeader,
    KVConfigRequestHeader,
    PutKVConfigRequestHeader,
)
from halfmq.remoting.bodies import encode_table
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply

from ...errors import RequestRefusedError
from ...ports import Connection, Handlers, serves
from ...tables.kv_table import KvConfig
from .change_queue import ChangeQueue


class KvConfigHandlers(Handlers):
    """Serves queries and changes of the KV configuration."""

    def __init__(self, config: KvConfig, changes: ChangeQueue) -> None:
        self._config = config
        self._changes = changes

    @serves(RequestCode.PUT_KV_CONFIG)
    def put(self, request: RemotingCommand, connection: Connection) -> None:
        """Set a value."""
        header = request.header_as(PutKVConfigRequestHeader)
        change = partial(self._config.put, header.namespace, header.key, header.value)
        what = f"KV configuration {header.namespace} {header.key}={header.value!r}"
        self._changes.make(change, what, request, connection)

    @serves(RequestCode.DELETE_KV_CONFIG)
    def delete(self, request: RemotingCommand, connection: Connection) -> None:
        """Remove a value; an unknown one is no error."""
        header = request.header_as(KVConfigRequestHeader)
        change = partial(self._config.delete, header.namespace, header.key)
        what = f"deleted KV configuration {header.namespace} {header.key}"
        self._changes.make(change, what, request, connection)

    @serves(RequestCode.GET_KV_CONFIG)
    def get(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with a value."""
        header = request.header_as(KVConfigRequestHeader)
        value = self._config.get(header.namespace, header.key)
        if value is None:
            raise _not_found(f"{header.namespace} Key: {header.key}")
        return encode_reply(request, header=GetKVConfigResponseHeader(value=value))

    @serves(RequestCode.GET_KVLIST_BY_NAMESPACE)
    def list_namespace(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with all values of a namespace."""
        header = request.header_as(GetKVListByNamespaceRequestHeader)
        values = self._config.namespace(header.namespace)
        if values is None:
            raise _not_found(header.namespace)
        return encode_reply(request, body=encode_table(values))


def _not_found(what: str) -> RequestRefusedError:
    return RequestRefusedError(f"No config item, Namespace: {what}", ResponseCode.QUERY_NOT_FOUND)
