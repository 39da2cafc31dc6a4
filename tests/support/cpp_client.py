"""Drives the C++ client of the wheel `rocketmq` and prints what it saw, one JSON object per line.

Run as a script in a process of its own: the library starts threads that outlive its objects, logs
into the home directory, and calls back from threads that Python did not make.

``cpp_client.py NAMESRV SCENARIO``

It signs with HALFMQ_ACCESS_KEY and HALFMQ_SECRET_KEY if they are set.
"""

from __future__ import annotations

import json
import os
import queue
import random
import sys
from collections.abc import Callable
from typing import Any

from rocketmq.client import Message, Producer, PullConsumer, PushConsumer, RecvMessage
from rocketmq.ffi import _CConsumeStatus, dll

from tests.support.patience import PATIENCE_S


def _say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


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
    **how: Any,
) -> list[dict[str, object]]:
    """Consume `count` messages by push; the first one is refused once when `fail_first`.

    `how` may set `orderly`.
    """
    arrived: queue.Queue[dict[str, object]] = queue.Queue()
    refused: list[str] = []

    def take(_consumer: object, handle: Any) -> Any:
        message = RecvMessage(handle)
        if fail_first and not refused:
            refused.append(message.body.decode())
            return _CConsumeStatus.RECONSUME_LATER.value
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
    try:
        return [arrived.get(timeout=PATIENCE_S) for _ in range(count)]
    finally:
        consumer.shutdown()


def send_and_consume(namesrv: str) -> None:
    """Send five messages one by one, one without waiting; consume those of two tags."""
    producer = _producer(namesrv, "cpp-producer")
    for number in range(5):
        result = producer.send_sync(_message("cpp", f"m-{number}", "ABC"[number % 3]))
        _say(sent=f"m-{number}", status=int(result.status), offset=result.offset, id=result.msg_id)
    producer.send_oneway(_message("cpp", "m-5", "A"))
    for one in _consume(namesrv, "cpp-consumer", "cpp", "A || B", 5):
        _say(consumed=one)
    producer.shutdown()


def batch(namesrv: str) -> None:
    """Send three messages as one batch; consume them."""
    producer = _producer(namesrv, "cpp-batch-producer")
    result = producer.send_batch([_message("cpp-batch", f"b-{number}", "T") for number in range(3)])
    _say(sent="batch", status=int(result.status), offset=result.offset)
    for one in _consume(namesrv, "cpp-batch-consumer", "cpp-batch", "*", 3):
        _say(consumed=one)
    producer.shutdown()


def in_order(namesrv: str) -> None:
    """Send six messages with one number as key, in order."""
    producer = _producer(namesrv, "cpp-order-producer")
    for number in range(6):
        result = producer.send_orderly(_message("cpp-order", f"o-{number}", "T"), 7)
        _say(sent=f"o-{number}", status=int(result.status), offset=result.offset)
    producer.shutdown()


def retry(namesrv: str) -> None:
    """Refuse a message once; it comes again by way of the broker."""
    producer = _producer(namesrv, "cpp-retry-producer")
    producer.send_sync(_message("cpp-retry", "again", "T"))
    for one in _consume(namesrv, "cpp-retry-consumer", "cpp-retry", "*", 1, fail_first=True):
        _say(consumed=one)
    producer.shutdown()


def orderly(namesrv: str) -> None:
    """Consume messages of two keys in order; the first one is refused once."""
    producer = _producer(namesrv, "cpp-orderly-producer")
    for number in range(8):
        producer.send_orderly(_message("cpp-orderly", f"o-{number}", "T"), number % 2)
    for one in _consume(
        namesrv, "cpp-orderly-consumer", "cpp-orderly", "*", 8, fail_first=True, orderly=True
    ):
        _say(consumed=one)
    producer.shutdown()


def delay(namesrv: str) -> None:
    """Send a message with a delay level, and one without."""
    producer = _producer(namesrv, "cpp-delay-producer")
    later = _message("cpp-delay", "later", "T")
    later.set_delay_time_level(3)
    producer.send_sync(later)
    producer.send_sync(_message("cpp-delay", "now", "T"))
    for one in _consume(namesrv, "cpp-delay-consumer", "cpp-delay", "*", 2):
        _say(consumed=one)
    producer.shutdown()


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
    producer.shutdown()


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
    producer.shutdown()


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
    consumer.shutdown()
    producer.shutdown()


SCENARIOS: dict[str, Callable[[str], None]] = {
    scenario.__name__: scenario
    for scenario in (
        *(send_and_consume, batch, in_order, retry, pull, refused),
        *(orderly, delay, large),
    )
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[2]](sys.argv[1])
    os._exit(0)  # the library's threads may crash a process that ends in order
