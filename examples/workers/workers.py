"""Four processes that send mails, in the order of each customer. Run ``python workers.py``.

SIGTERM ends all: each finishes what it has in hand. One that dies is replaced, and the others get
its messages. What can never be sent becomes a dead letter at once; see ``halfmq dlq list``.
"""

import json
import logging
import os
import signal
import smtplib
import threading
from datetime import timedelta
from email.message import EmailMessage
from multiprocessing import get_context
from types import FrameType

from halfmq.client.blocking import Consumer, MessageView, ReceivedMessage, RetryPolicy

PROCESSES = 4
POLICY = RetryPolicy(
    reject=(ValueError, KeyError),  # not JSON, or no customer
    delays={OSError: [timedelta(seconds=1), timedelta(seconds=30), timedelta(minutes=5)]},
)
stopping = threading.Event()
children = get_context("spawn")  # a client is started in the process that uses it


def customer_of(message: ReceivedMessage) -> str | None:
    """Mails of one customer are sent one after the other."""
    return message.keys or None


def send(message: MessageView) -> None:
    """Send a mail; an exception retries the message, as POLICY says."""
    order = json.loads(message.body)
    mail = EmailMessage()
    mail["To"], mail["Subject"] = order["customer"], f"Order {order['number']}"
    mail["Message-ID"] = f"<{message.inbox_id}@shop>"  # equal in a repeated mail
    host, _, port = os.environ.get("SMTP_ADDRESS", "127.0.0.1:25").partition(":")
    with smtplib.SMTP(host, int(port), timeout=30) as server:
        server.send_message(mail, from_addr="shop@example.com")


def work() -> None:
    """Handle messages until SIGTERM."""
    logging.basicConfig(level=logging.INFO)
    consumer = Consumer("mails", {"orders": "*"}, start_from="first")
    consumer.wait_until_available(timeout=300)
    with consumer:
        consumer.run(send, concurrency=8, ordered_by=customer_of, policy=POLICY)


def stop(_number: int, _frame: FrameType | None) -> None:
    """End the workers, and replace none."""
    stopping.set()


def main() -> None:
    """Keep the workers running."""
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    workers = [children.Process(target=work) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()
    while not stopping.wait(1):
        for place, worker in enumerate(workers):
            if not worker.is_alive():
                workers[place] = children.Process(target=work)
                workers[place].start()
    for worker in workers:
        worker.terminate()  # SIGTERM
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
