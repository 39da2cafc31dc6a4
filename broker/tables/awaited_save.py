"""Save a table on a thread while the requests that need its new entries are deferred.

A new topic must be in its file before the log has a record of it. Otherwise, after a kill, neither
the broker nor an auditor would know where the record belongs. The event loop must not wait for the
disk, so a request that creates a topic is deferred, and served from its beginning when the file is
on disk.

Then topics become visible a few at a time, each together with its deferred requests. So the
requests for one topic are served in order, also those that arrive between two steps.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from attrs import define, field

from ..errors import RequestRefusedError
from ..limits.kept import NEW_TOPIC_BYTES

WAITING_MAX: Final = 256
"""Deferred requests. The connection of a further one waits with it for the end of a save, which
takes a tenth of a second if there are very many topics."""

TOPICS_PER_PASS: Final = 4
"""Topics that become visible in one pass of the event loop. The first message of each creates two
directories and a file, which takes a tenth to a fifth of a millisecond."""

ServeDeferred = Callable[[RequestRefusedError | None], None]
"""Serves a deferred request, or answers it with the refusal."""


@define(eq=False, repr=False)
class AwaitedSave:
    """Saves, one save after the other, for as long as requests wait for one.

    Args:
        begin: Takes what is to be saved; returns the function that a thread calls to save it.
        end: Called on the event loop with the error of the save; returns the refusal for the
            requests that waited, None after a success.
        publish: Makes a saved topic visible.
    """

    _begin: Callable[[], Callable[[], None]]
    _end: Callable[[OSError | None], RequestRefusedError | None]
    _publish: Callable[[str], None]
    # Requests by topic: until their topic is saved, and then.
    _waiting: dict[str, list[ServeDeferred]] = field(init=False, factory=dict)
    _ready: dict[str, list[ServeDeferred]] = field(init=False, factory=dict)
    _refusal: RequestRefusedError | None = field(init=False, default=None)  # of the ready ones
    _requests: int = field(init=False, default=0)
    _for_room: list[Callable[[], None]] = field(init=False, factory=list)
    bytes: int = field(init=False, default=0)
    """Bytes of the bodies of the deferred requests."""
    _busy: bool = field(init=False, default=False)  # a thread saves, or there are ready requests

    @property
    def is_full(self) -> bool:
        """Whether no more requests can wait."""
        return self._requests >= WAITING_MAX or self.bytes >= NEW_TOPIC_BYTES.most

    def when_room(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` when the requests that wait now are served; only while ``is_full``."""
        self._for_room.append(resume)

    def wait(self, topics: Sequence[str], serve: ServeDeferred, size: int) -> None:
        """Call ``serve`` when the topics are saved; ``size`` is that of the request's body."""
        left = len(topics)

        def count_down(refusal: RequestRefusedError | None) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._requests -= 1
                self.bytes -= size
                serve(refusal)

        self._requests += 1
        self.bytes += size
        for topic in topics:
            requests = self._ready if topic in self._ready else self._waiting
            requests.setdefault(topic, []).append(count_down)
        if not self._busy:
            self._save()

    def _save(self) -> None:
        self._busy = True
        future = asyncio.get_running_loop().run_in_executor(None, self._begin())
        future.add_done_callback(self._saved)

    def _saved(self, future: asyncio.Future[None]) -> None:
        self._busy = False
        if future.cancelled():
            return
        error = future.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        self._refusal = self._end(error)
        # A topic that was requested during this save needs another one; serving its request
        # starts it.
        self._ready, self._waiting = self._waiting, {}
        self._busy = True
        self._serve()

    def _serve(self) -> None:
        for topic in list(islice(self._ready, TOPICS_PER_PASS)):
            if self._refusal is None:
                self._publish(topic)
            for serve in self._ready.pop(topic):
                serve(self._refusal)
        if self._ready:
            asyncio.get_running_loop().call_soon(self._serve)
            return
        resumed, self._for_room = self._for_room, []
        for resume in resumed:
            resume()
        if self._waiting:
            self._save()
        else:
            self._busy = False
