"""Drives the C++ client of the wheel `rocketmq` and prints what it saw, one JSON object per line.

Run as a script in a process of its own: the library starts threads that outlive its objects, logs
into the home directory, and calls back from threads that Python did not make. A scenario leaves its
clients running and the process ends at once: `shutdown` of this library frees what its own threads
still use, and now and then ends the process by SIGSEGV.

``cpp_client.py NAMESRV SCENARIO [ARGUMENT…]``

It signs with HALFMQ_ACCESS_KEY and HALFMQ_SECRET_KEY if they are set.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rocketmq.client import Message, Producer, PullConsumer, PushConsumer, RecvMessage
from rocketmq.exceptions import RocketMQException
from rocketmq.ffi import MessageModel, _CConsumeStatus, dll

from tests.support.patience import PATIENCE_S


def _say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")  # in one piece: consumers have many threads
    sys.stdout.flush()


def _message(topic: str, body: str, tags: str, keys: str = "") -> Any:
    message = Message(topic)
    message.set_body(body)
    message.set_tags(tags)
    message.set_keys(keys or body)
    return message


def _sign(client: Any) -> Any:
    key = os.environ.get("HALFMQ_ACCESS_KEY")
    if key:
        client.set_session_credentials(key, os.environ["HALFMQ_SECRET_KEY"], "")
    return client


def _producer(namesrv: str, group: str) -> Any:
    producer = _sign(Producer(group))
    producer.set_namesrv_addr(namesrv)
    producer.start()
    return producer


def _consume(
    namesrv: str,
    group: str,
    topic: str,
    expression: str,
    count: int,
    fail_first: bool = False,
    tell: bool = False,
    **how: Any,
) -> list[dict[str, object]]:
    """Consume `count` messages by push; the first one is refused once when `fail_first`.

    With `tell` each is said as it comes.

    `how` may set `orderly`.
    """
    arrived: queue.Queue[dict[str, object]] = queue.Queue()
    refused: list[str] = []

    def take(_consumer: object, handle: Any) -> Any:
        message = RecvMessage(handle)
        if fail_first and not refused:
            refused.append(message.body.decode())
            return _CConsumeStatus.RECONSUME_LATER.value
        if tell:
            _say(body=message.body.decode())
        arrived.put(
            {
                "body": message.body.decode(),
                "queue": message.queue_id,
                "stored_after_ms": message.store_timestamp - message.born_timestamp,
                "tags": (message.tags or b"").decode(),
                "keys": (message.keys or b"").decode(),
                "queue_offset": message.queue_offset,
                "times": message.reconsume_times,
            }
        )
        return _CConsumeStatus.CONSUME_SUCCESS.value

    consumer = _sign(PushConsumer(group, **how))
    consumer.set_namesrv_addr(namesrv)
    # Not `subscribe`: it cannot refuse a message, its callback loses the status it returns.
    dll.Subscribe(consumer._handle, topic.encode(), expression.encode())
    consumer._register_callback(take)
    consumer.start()
    return [arrived.get(timeout=PATIENCE_S) for _ in range(count)]


def send_and_consume(namesrv: str) -> None:
    """Send five messages one by one, one without waiting; consume those of two tags."""
    producer = _producer(namesrv, "cpp-producer")
    for number in range(5):
        result = producer.send_sync(_message("cpp", f"m-{number}", "ABC"[number % 3]))
        _say(sent=f"m-{number}", status=int(result.status), offset=result.offset, id=result.msg_id)
    producer.send_oneway(_message("cpp", "m-5", "A"))
    for one in _consume(namesrv, "cpp-consumer", "cpp", "A || B", 5):
        _say(consumed=one)


def batch(namesrv: str) -> None:
    """Send three messages as one batch; consume them."""
    producer = _producer(namesrv, "cpp-batch-producer")
    result = producer.send_batch([_message("cpp-batch", f"b-{number}", "T") for number in range(3)])
    _say(sent="batch", status=int(result.status), offset=result.offset)
    for one in _consume(namesrv, "cpp-batch-consumer", "cpp-batch", "*", 3):
        _say(consumed=one)


def in_order(namesrv: str) -> None:
    """Send six messages with one number as key, in order."""
    producer = _producer(namesrv, "cpp-order-producer")
    for number in range(6):
        result = producer.send_orderly(_message("cpp-order", f"o-{number}", "T"), 7)
        _say(sent=f"o-{number}", status=int(result.status), offset=result.offset)


def _nth(_count: int, _message: object, number: Any) -> int:
    """Select the queue of a number."""
    return int(ctypes.cast(number, ctypes.POINTER(ctypes.c_int)).contents.value)


def chosen(namesrv: str) -> None:
    """Send a message to each of four queues; consume them."""
    producer = _producer(namesrv, "cpp-chosen-producer")
    for number in range(4):
        producer.send_orderly(
            _message("cpp-chosen", f"c-{number}", "T"), number, queue_selector=_nth
        )
    for one in _consume(namesrv, "cpp-chosen-consumer", "cpp-chosen", "*", 4):
        _say(consumed=one)


def retry(namesrv: str) -> None:
    """Refuse a message once; it comes again by way of the broker."""
    producer = _producer(namesrv, "cpp-retry-producer")
    producer.send_sync(_message("cpp-retry", "again", "T"))
    for one in _consume(namesrv, "cpp-retry-consumer", "cpp-retry", "*", 1, fail_first=True):
        _say(consumed=one)


def orderly(namesrv: str) -> None:
    """Consume messages of two keys in order; the first one is refused once."""
    producer = _producer(namesrv, "cpp-orderly-producer")
    for number in range(8):
        producer.send_orderly(_message("cpp-orderly", f"o-{number}", "T"), number % 2)
    for one in _consume(
        namesrv, "cpp-orderly-consumer", "cpp-orderly", "*", 8, fail_first=True, orderly=True
    ):
        _say(consumed=one)


def reset(namesrv: str) -> None:
    """Consume three messages, and then again what an operator sends the group to."""
    producer = _producer(namesrv, "cpp-reset-producer")
    for number in range(3):
        producer.send_sync(_message("cpp-reset", f"r-{number}", "T"))
    _consume(namesrv, "cpp-reset-consumer", "cpp-reset", "*", 6, tell=True)


def delay(namesrv: str) -> None:
    """Send a message with a delay level, and one without."""
    producer = _producer(namesrv, "cpp-delay-producer")
    later = _message("cpp-delay", "later", "T")
    later.set_delay_time_level(3)
    producer.send_sync(later)
    producer.send_sync(_message("cpp-delay", "now", "T"))
    for one in _consume(namesrv, "cpp-delay-consumer", "cpp-delay", "*", 2):
        _say(consumed=one)


def large(namesrv: str) -> None:
    """Send a body that the client compresses, one that is too large, and one after it."""
    producer = _producer(namesrv, "cpp-large-producer")
    producer.set_max_message_size(8 << 20)
    producer.send_sync(_message("cpp-large", "a" * 6000, "T", "large"))
    try:
        # It does not get smaller by compression.
        producer.send_sync(
            _message("cpp-large", random.Random(1).randbytes(4 << 20).hex(), "T", "x")
        )
    except Exception as refusal:  # noqa: BLE001 -- which kind it is, is for the test to see
        _say(kind=type(refusal).__name__)
    producer.send_sync(_message("cpp-large", "after", "T"))
    for one in _consume(namesrv, "cpp-large-consumer", "cpp-large", "*", 2):
        _say(consumed=one)


def refused(namesrv: str) -> None:
    """Send what may be refused, and say what is told."""
    producer = _producer(namesrv, "cpp-refused-producer")
    for topic in ("cpp", "cpp-denied", "not-mine"):
        try:
            producer.send_sync(_message(topic, "refused", "T"))
        except Exception as refusal:  # noqa: BLE001 -- which kind it is, is for the test to see
            _say(topic=topic, kind=type(refusal).__name__, text=str(refusal))
        else:
            _say(topic=topic, kind=None)


def _member(
    namesrv: str, group: str, topic: str, name: str, *, model: Any = MessageModel.CLUSTERING
) -> tuple[Any, queue.Queue[str]]:
    """Start a push consumer; return it and what it consumes."""
    arrived: queue.Queue[str] = queue.Queue()

    def take(_consumer: object, handle: Any) -> Any:
        arrived.put(RecvMessage(handle).body.decode())
        return _CConsumeStatus.CONSUME_SUCCESS.value

    consumer = PushConsumer(group, message_model=model)
    consumer.set_instance_name(name)  # two clients of a process are one client otherwise
    consumer.set_namesrv_addr(namesrv)
    dll.Subscribe(consumer._handle, topic.encode(), b"*")
    consumer._register_callback(take)
    consumer.start()
    return consumer, arrived


def _send_until(producer: Any, topic: str, reached: Callable[[], bool]) -> None:
    """Send messages that nobody counts until it is so."""
    for _ in range(int(PATIENCE_S / 0.1)):
        if reached():
            return
        producer.send_sync(_message(topic, "warming", "T"))
        time.sleep(0.1)
    raise AssertionError("a member consumes nothing")


def _has_any(arrived: queue.Queue[str]) -> bool:
    return not arrived.empty()


def _send_each(producer: Any, topic: str, bodies: list[str]) -> None:
    for body in bodies:
        producer.send_sync(_message(topic, body, "T"))


def _take_all(arrived: queue.Queue[str], bodies: set[str]) -> list[str]:
    """Take what arrives until these have; return the others among them, too, but the warming."""
    taken: list[str] = []
    while not bodies <= set(taken):
        body = arrived.get(timeout=PATIENCE_S)
        taken += [body] if body != "warming" else []
    return taken


def broadcasting(namesrv: str) -> None:
    """Send four messages to two consumers of a group, which both get all."""
    producer = _producer(namesrv, "cpp-broadcasting-producer")
    topic, bodies = "cpp-broadcasting", [f"b-{number}" for number in range(4)]
    producer.send_sync(_message(topic, "warming", "T"))
    members = [
        _member(namesrv, "cpp-broadcasting", topic, name, model=MessageModel.BROADCASTING)
        for name in ("first", "second")
    ]
    for _, arrived in members:
        _send_until(producer, topic, partial(_has_any, arrived))
    _send_each(producer, topic, bodies)
    for name, (_, arrived) in zip(("first", "second"), members, strict=True):
        for body in _take_all(arrived, set(bodies)):
            _say(given=body, to=name)


def sharing(namesrv: str) -> None:
    """Send messages to two consumers that share the queues, and to the one that is left."""
    producer = _producer(namesrv, "cpp-sharing-producer")
    topic = "cpp-sharing"
    producer.send_sync(_message(topic, "warming", "T"))
    members = [_member(namesrv, "cpp-sharing", topic, name) for name in ("stays", "leaves")]
    for _, arrived in members:
        _send_until(producer, topic, partial(_has_any, arrived))
    members[1][0].shutdown()
    bodies = [f"s-{number}" for number in range(16)]
    _send_each(producer, topic, bodies)
    for body in _take_all(members[0][1], set(bodies)):
        _say(given=body, to="stays")


def victim(namesrv: str) -> None:
    """Consume as a member of a group until the process is killed."""
    _, arrived = _member(namesrv, "cpp-killed", "cpp-killed", "victim")
    _say(given=arrived.get(timeout=PATIENCE_S), to="victim")
    time.sleep(PATIENCE_S)


def killed(namesrv: str) -> None:
    """Share the queues with another process, kill that one, and consume what comes then."""
    producer = _producer(namesrv, "cpp-killed-producer")
    topic, bodies = "cpp-killed", [f"k-{number}" for number in range(16)]
    producer.send_sync(_message(topic, "warming", "T"))
    _, arrived = _member(namesrv, "cpp-killed", topic, "survivor")
    command = [sys.executable, "-m", "tests.support.cpp_client", namesrv, victim.__name__]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        read = process.stdout.read
        _send_until(producer, topic, lambda: bool(read()))
        _send_until(producer, topic, partial(_has_any, arrived))
        process.kill()
    _send_each(producer, topic, bodies)
    for body in _take_all(arrived, set(bodies)):
        _say(given=body, to="survivor")


def pull(namesrv: str) -> None:
    """Pull from every queue of a topic with the plain pull consumer."""
    producer = _producer(namesrv, "cpp-pull-producer")
    for number in range(4):
        producer.send_sync(_message("cpp-pull", f"p-{number}", "T"))
    consumer = _sign(PullConsumer("cpp-pull-consumer"))
    consumer.set_namesrv_addr(namesrv)
    consumer.start()
    for message in consumer.pull("cpp-pull"):
        _say(consumed={"body": message.body.decode(), "queue_offset": message.queue_offset})


def read(namesrv: str, topic: str) -> None:
    """Pull everything that a topic has from every queue."""
    consumer = _sign(PullConsumer("cpp-reader"))
    consumer.set_namesrv_addr(namesrv)
    consumer.start()
    for message in consumer.pull(topic):
        _say(consumed={"body": message.body.decode(), "queue_offset": message.queue_offset})


def retrying(namesrv: str, topic: str) -> None:
    """Send one message after the other; one that fails ends it."""
    producer = _producer(namesrv, "cpp-retrying-producer")
    for number in itertools.count():
        producer.send_sync(_message(topic, f"r-{number}", "T"))
        _say(event="sent", body=f"r-{number}")
        time.sleep(0.005)


def repeated(namesrv: str) -> None:
    """Send a message that is refused, and one to the second queue."""
    producer = _producer(namesrv, "cpp-repeated-producer")
    with contextlib.suppress(RocketMQException):
        producer.send_sync(_message("orders", "r-0", "T"))
    with contextlib.suppress(RocketMQException):
        producer.send_orderly(_message("orders", "r-1", "T"), 1, queue_selector=_nth)


def _listen(namesrv: str, topic: str, orderly: str) -> Any:
    """Start a member of the topic's group that says what it consumes, and when."""

    def take(_consumer: object, handle: Any) -> Any:
        message = RecvMessage(handle)
        body = message.body.decode()
        _say(event="consumed", body=body, queue=message.queue_id, at=time.time_ns())
        return _CConsumeStatus.CONSUME_SUCCESS.value

    consumer = PushConsumer(topic, orderly=orderly == "orderly")
    consumer.set_namesrv_addr(namesrv)
    dll.Subscribe(consumer._handle, topic.encode(), b"*")
    consumer._register_callback(take)
    consumer.start()
    return consumer


def flow(namesrv: str, topic: str, orderly: str) -> None:
    """Send numbers, each until it is acknowledged, and consume."""
    producer = _producer(namesrv, f"{topic}-producer")
    running = []
    for number in range(200):
        acknowledged = False
        while not acknowledged:
            with contextlib.suppress(RocketMQException):
                message = _message(topic, f"n-{number}", "T")
                producer.send_orderly(message, number % 4, queue_selector=_nth)
                acknowledged = True
            time.sleep(0.02)
        if number == 0:
            running.append(_listen(namesrv, topic, orderly))
        if number % 50 == 49:
            _say(event="sent", count=number + 1)
    threading.Event().wait()


def guest(namesrv: str, topic: str, orderly: str) -> None:
    """Be a member of the group until it is asked to leave."""
    consumer = _listen(namesrv, topic, orderly)
    sys.stdin.read()
    consumer.shutdown()


SCENARIOS: dict[str, Callable[..., None]] = {
    scenario.__name__: scenario
    for scenario in (
        *(send_and_consume, batch, in_order, retry, pull, refused),
        *(orderly, delay, large, broadcasting, sharing, victim, killed, reset),
        *(chosen, read, retrying, repeated, flow, guest),
    )
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[2]](sys.argv[1], *sys.argv[3:])
    os._exit(0)  # the library's threads run on
