"""A worker that is about to be killed or stopped, and writes down what it does.

`main` is the program: ADDRESS TOPIC PATH NAME HOW CALLS. HOW has settings of the consumer as JSON,
and with ``ordered_by`` as CALLS messages of a key are handled one after the other. A line at PATH
is NAME, a word and the message: ``got``, ``did``; ``runs`` and ``left`` have none.
"""

from __future__ import annotations

import asyncio
import json
import os

from halfmq.client import ClientConfig, Consumer, MessageView


def main(address: str, topic: str, path: str, name: str, how: str, calls: str) -> None:
    """Work until SIGTERM."""
    out = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)

    def say(word: bytes, body: bytes) -> None:
        os.write(out, b"%s %s %s\n" % (name.encode(), word, body))

    async def handle(message: MessageView) -> None:
        say(b"got", message.body)
        await asyncio.sleep(0.003)
        say(b"did", message.body)

    async def work() -> None:
        config = ClientConfig(namesrv=address, offset_commit_interval=0.2, heartbeat_interval=0.5)
        group = Consumer(topic, {topic: "*"}, start_from="first", config=config, **json.loads(how))
        async with group as consumer:
            asyncio.get_running_loop().call_soon(say, b"runs", b"- 0")
            by_key = (lambda one: one.body.split()[0]) if calls == "ordered_by" else None
            summary = await consumer.run(handle, ordered_by=by_key)
            say(b"left", b"- %d" % summary.left)

    asyncio.run(work())
