"""Settings of the broker (25, 26), and of the name server that is part of it (318, 319).

Both are one process with one configuration.

Source: RocketMQ 5.3.3 `AdminBrokerProcessor`, `DefaultRequestProcessor` of the name server.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Final

from halfmq.remoting.admin_headers import GetBrokerConfigResponseHeader
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply

from ...config_file import decode_settings
from ...errors import BrokerConfigError, invalid_parameter
from ...live_settings import LiveSettings
from ...ports import Connection, Handlers, serves
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
        change = partial(self._settings.change, wanted, connection.name)
        self._changes.make(change, what, request, connection)
