"""Where programs are compiled, and a server that keeps what the load generator sends to it."""

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder

Answer = Callable[[RemotingCommand], bytes]


@contextmanager
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have programs compiled into a directory of the tests; skipped where nothing compiles."""
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("no C compiler: programs of the benchmarks are not tested on this machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALFMQ_BENCHMARKS_DIR", str(tmp_path_factory.mktemp("benchmarks")))
        yield


@dataclass
class RecordingServer:
    """What came in so far; ``failures`` is why a connection was given up."""

    port: int
    requests: list[RemotingCommand] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)


@contextmanager
def recording_server(answer: Answer) -> Iterator[RecordingServer]:
    """Listen on a free port until the block is left."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = RecordingServer(listener.getsockname()[1])
        threading.Thread(target=_accept, args=(listener, server, answer), daemon=True).start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread


def _accept(listener: socket.socket, server: RecordingServer, answer: Answer) -> None:
    while True:
        try:
            connection, _peer = listener.accept()
        except OSError:
            return
        thread = threading.Thread(target=_serve, args=(connection, server, answer), daemon=True)
        thread.start()


def _serve(connection: socket.socket, server: RecordingServer, answer: Answer) -> None:
    decoder = FrameDecoder()
    with connection:
        try:
            while data := connection.recv(65536):
                commands = decoder.receive_data(data)
                server.requests += commands
                replies = [answer(command) for command in commands if not command.is_one_way]
                connection.sendall(b"".join(replies))
        except ConnectionError:
            return
        except Exception as error:  # noqa: BLE001 - the test looks at it
            server.failures.append(error)
