"""One blocking connection to our broker, for what a benchmark asks beside its load."""

import socket
from typing import Final, Self

import msgspec

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.replies import encode_request

from .processes import ServerError

_TIMEOUT: Final = 30.0  # seconds: longer than any pause worth measuring
_RECEIVED_AT_ONCE: Final = 1 << 16  # bytes


class _Table(msgspec.Struct):
    table: dict[str, str]


class Questions:
    """PeerRequests one thing after the other."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), _TIMEOUT)
        self._decoder = FrameDecoder(responses_first=True)
        self._opaque = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, code: int) -> RemotingCommand:
        """Return the answer to a request without header.

        Raises:
            ServerError: The broker refuses it, or has gone.
        """
        self._opaque += 1
        self._socket.sendall(encode_request(code, opaque=self._opaque))
        answers: list[RemotingCommand] = []
        while not answers:
            data = self._socket.recv(_RECEIVED_AT_ONCE)
            if not data:
                raise ServerError("the broker has closed the connection")
            answers = self._decoder.receive_data(data)
        if answers[0].code != ResponseCode.SUCCESS:
            raise ServerError(f"the broker refuses: {answers[0].code} {answers[0].remark}")
        return answers[0]

    def send(self, frame: bytes) -> None:
        """Send what is not answered."""
        self._socket.sendall(frame)

    def metrics(self) -> dict[str, str]:
        """Return what ``halfmq broker metrics`` shows, and more."""
        body = self.ask(RequestCode.GET_BROKER_RUNTIME_INFO).body
        return msgspec.json.decode(body, type=_Table).table

    def write_offset(self) -> int:
        """Return how long the log is, in bytes."""
        return int(self.metrics()["halfmq.store.write_offset"])
