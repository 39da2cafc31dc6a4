"""`kill -9` between a half and its answer: if sent again, it is the same transaction.

Real processes, real sockets, real files. The seed of the pauses is printed and can be set by
`HALFMQ_SEED`.
"""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from pathlib import Path

from halfmq.broker.transaction.deduplication import REFILL_BYTES_MAX
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.remoting.codes import HeaderType, RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.own_requests import TransactionsRequestHeader, encode_entries
from halfmq.remoting.replies import encode_request
from halfmq.store.format.properties import encode_properties
from tests.support.ledger_log import read_log
from tests.support.patience import PATIENCE_S
from tests.support.prepares import part
from tests.support.seeds import printed_seed
from tests.support.usual_headers import send_header

ROUNDS = 4
BURST = 40  # halves in flight at each kill


LARGE_BODY = bytes(300_000)
LARGE_HALVES = 260  # more of them than a start reads


def _single(key: str, opaque: int, body: bytes = b"") -> bytes:
    marks = {"TRAN_MSG": "true", "PGROUP": "pg", "UNIQ_KEY": key}
    header = send_header(
        sys_flag=4,
        born_timestamp=int(time.time() * 1_000),
        properties=encode_properties(marks).decode(),
    )
    return encode_request(
        RequestCode.SEND_MESSAGE_V2, opaque=opaque, header=header, body=body or key.encode()
    )


def _several(key: str, opaque: int) -> bytes:
    messages = [part(f"{key}-{number}", key.encode(), queue_id=0) for number in range(3)]
    return encode_request(
        RequestCode.PREPARE_TRANSACTION,
        opaque=opaque,
        header=TransactionsRequestHeader(producer_group="pg"),
        body=encode_entries(messages),
        header_type=HeaderType.MSGPACK,
    )


def _connect(broker: BrokerProcess) -> socket.socket:
    host, _, port = broker.ready["listen"].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def _answers(connection: socket.socket, count: int) -> list[RemotingCommand]:
    decoder = FrameDecoder(responses_first=True)
    answers: list[RemotingCommand] = []
    while len(answers) < count:
        data = connection.recv(1 << 16)
        assert data, "the broker closed the connection"
        answers += decoder.receive_data(data)
    return answers


def test_a_half_sent_again_after_a_kill_is_in_the_log_once(tmp_path: Path) -> None:
    """Whether it was on disk before the kill or not; for one message and for several."""
    chance = random.Random(printed_seed())
    duplicates = 0
    with broker_process(tmp_path, transactionTimeOut=3_600_000) as broker:
        with _connect(broker) as connection:  # so that the topic exists
            connection.sendall(_single("first", 1))
            _answers(connection, 1)
        for round_number in range(ROUNDS):
            make = _several if round_number % 2 else _single
            keys = [f"K{round_number}-{number}" for number in range(BURST)]
            frames = [make(key, opaque) for opaque, key in enumerate(keys)]
            with _connect(broker) as connection:
                for frame in frames:
                    connection.sendall(frame)
                time.sleep(chance.choice([0, 0.001, 0.005, 0.02]))  # the kill hits any step
                broker.kill()
            broker.start()
            before = len(read_log(broker.directory / "store").halves)
            with _connect(broker) as connection:
                connection.sendall(b"".join(frames))
                answers = _answers(connection, BURST)
            assert {answer.code for answer in answers} == {0}
            added = len(read_log(broker.directory / "store").halves) - before
            duplicates += BURST * (3 if make is _several else 1) - added
        broker.stop()

    truth = read_log(tmp_path / "store")
    # A kill may leave a part of several messages, which is rolled back and does not count.
    undecided = Counter(truth.halves[half].property_map["UNIQ_KEY"] for half in truth.undecided)
    print(f"undecided={len(undecided)} recognised={duplicates} rolled_back={len(truth.rollbacks)}")
    assert {key for key, count in undecided.items() if count > 1} == set()
    assert len(undecided) == 1 + ROUNDS // 2 * BURST * 4
    assert duplicates > 0


def test_of_large_halves_the_newest_are_known_after_a_kill(tmp_path: Path) -> None:
    """The newest halves that a start reads within its bytes keep their ids when sent again."""
    keys = [f"K{number}" for number in range(LARGE_HALVES)]
    frames = [_single(key, opaque, LARGE_BODY) for opaque, key in enumerate(keys)]
    with broker_process(tmp_path, transactionTimeOut=3_600_000) as broker:
        with _connect(broker) as connection:
            first = []
            for frame in frames:
                connection.sendall(frame)
                first += _answers(connection, 1)
        broker.kill()
        broker.start()
        with _connect(broker) as connection:
            again = []
            for frame in frames:
                connection.sendall(frame)
                again += _answers(connection, 1)
        broker.stop()

    recognised = [one.header == other.header for one, other in zip(first, again, strict=True)]
    record_size = len(LARGE_BODY) + 400  # with its head, topic and properties
    expected = REFILL_BYTES_MAX // record_size
    print(f"recognised={sum(recognised)} expected={expected}")
    assert {answer.code for answer in first + again} == {0}
    assert sum(recognised) >= expected
    assert recognised == sorted(recognised), "an older half is known and a newer one is not"
