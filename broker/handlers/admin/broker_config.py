"""Settings of the broker and its name server, KV configuration, and deletion of files on request.

Broker (25, 26) and name server (318, 319) are one process with one configuration. The KV
configuration (100 to 102, 219) is the name server's.

Source: RocketMQ 5.3.3 `AdminBrokerProcessor`, `DefaultRequestProcessor` of the name server.
"""

import json
import logging
from collections.abc import Callable
from typing import Final

from attrs import define

from halfmq.remoting.admin_headers import (
    GetBrokerConfigResponseHeader,
    GetKVConfigResponseHeader,
    GetKVListByNamespaceRequestHeader,
    KVConfigRequestHeader,
    PutKVConfigRequestHeader,
)
from halfmq.remoting.bodies import encode_table
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply

from ...config_file import decode_settings
from ...errors import BrokerConfigError, RequestRefusedError, invalid_parameter
from ...live_settings import LiveSettings
from ...ports import Connection, Handlers, serves
from ...tables.kv_table import KvConfig
from .change_queue import ChangeQueue

SETTINGS_BYTES_MAX: Final = 65_536
"""Bytes of one request to change settings; all settings together have a tenth."""


class SettingsHandlers(Handlers):
    """Serves queries and changes of settings."""

    def __init__(self, settings: LiveSettings, changes: ChangeQueue) -> None:
        self._settings = settings
        self._changes = changes

    @serves(RequestCode.GET_BROKER_CONFIG)
    def get(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with all settings as ``key=value`` lines."""
        version = json.dumps(self._settings.data_version, separators=(",", ":"))
        header = GetBrokerConfigResponseHeader(version=version)
        return encode_reply(request, header=header, body=self._settings.text().encode())

    @serves(RequestCode.GET_NAMESRV_CONFIG)
    def get_of_name_server(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with all settings as ``key=value`` lines, without a version."""
        return encode_reply(request, body=self._settings.text().encode())

    @serves(RequestCode.UPDATE_BROKER_CONFIG, RequestCode.UPDATE_NAMESRV_CONFIG)
    def update(self, request: RemotingCommand, connection: Connection) -> None:
        """Change all settings of the request, or none if one is refused."""
        if len(request.body) > SETTINGS_BYTES_MAX:
            raise invalid_parameter(f"{len(request.body)} bytes, the limit is {SETTINGS_BYTES_MAX}")
        try:
            wanted = decode_settings(request.body)
        except BrokerConfigError as error:
            raise invalid_parameter(str(error)) from error
        self._settings.check(wanted)
        what = f"settings {', '.join(sorted(wanted))}"
        change = self._settings.change
        self._changes.make(request, connection, what, change, wanted, connection.name)


logger = logging.getLogger(__name__)


class KvConfigHandlers(Handlers):
    """Serves queries and changes of the KV configuration."""

    def __init__(self, config: KvConfig, changes: ChangeQueue) -> None:
        self._config = config
        self._changes = changes

    @serves(RequestCode.PUT_KV_CONFIG)
    def put(self, request: RemotingCommand, connection: Connection) -> None:
        header = request.header_as(PutKVConfigRequestHeader)
        name, key, value = header.namespace, header.key, header.value
        what = f"KV configuration {name} {key}={value!r}"
        self._changes.make(request, connection, what, self._config.put, name, key, value)

    @serves(RequestCode.DELETE_KV_CONFIG)
    def delete(self, request: RemotingCommand, connection: Connection) -> None:
        """Remove a value; an unknown one is no error."""
        header = request.header_as(KVConfigRequestHeader)
        name, key = header.namespace, header.key
        what = f"deleted KV configuration {name} {key}"
        self._changes.make(request, connection, what, self._config.delete, name, key)

    @serves(RequestCode.GET_KV_CONFIG)
    def get(self, request: RemotingCommand, _connection: Connection) -> bytes:
        header = request.header_as(KVConfigRequestHeader)
        value = self._config.get(header.namespace, header.key)
        if value is None:
            raise _not_found(f"{header.namespace} Key: {header.key}")
        return encode_reply(request, header=GetKVConfigResponseHeader(value=value))

    @serves(RequestCode.GET_KVLIST_BY_NAMESPACE)
    def list_namespace(self, request: RemotingCommand, _connection: Connection) -> bytes:
        header = request.header_as(GetKVListByNamespaceRequestHeader)
        values = self._config.namespace(header.namespace)
        if values is None:
            raise _not_found(header.namespace)
        return encode_reply(request, body=encode_table(values))


def _not_found(what: str) -> RequestRefusedError:
    return RequestRefusedError(f"No config item, Namespace: {what}", ResponseCode.QUERY_NOT_FOUND)


@define(eq=False, repr=False)
class CleaningHandlers(Handlers):
    """Requests the deletion of files (306, 316, 329); answers at once, as RocketMQ does.

    RocketMQ keeps queues without messages, and those of unknown topics, until 306 and 316. Here
    their files are deleted with the files of the log, so these requests only delete what an
    interrupted deletion has left.

    Source: RocketMQ 5.3.3 `AdminBrokerProcessor#cleanExpiredConsumeQueue`, `#cleanUnusedTopic`.
    """

    _delete_expired: Callable[[], None]  # starts the deletion of old files of the log, at any hour
    _delete_queue_files: Callable[[], None]  # deletes files of queues without messages

    @serves(RequestCode.DELETE_EXPIRED_COMMITLOG)
    def clean_log(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Delete files of the log that are older than the retention time."""
        logger.info("event=deletion_asked what=log peer=%s", connection.name)
        self._delete_expired()
        return encode_reply(request)

    @serves(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, RequestCode.CLEAN_UNUSED_TOPIC)
    def clean_queues(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Delete queue files whose messages were deleted."""
        logger.info("event=deletion_asked what=queues peer=%s", connection.name)
        self._delete_queue_files()
        return encode_reply(request)
