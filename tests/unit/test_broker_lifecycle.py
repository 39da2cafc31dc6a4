"""Services start bottom-up, stop top-down, and a failed start leaves nothing running."""

from __future__ import annotations

import pytest

from halfmq.broker.lifecycle import ServiceStack


class Part:
    """Notes its starts and stops in a shared list."""

    def __init__(self, name: str, events: list[str], *, fails: bool = False) -> None:
        self._name, self._events, self._fails = name, events, fails

    async def start(self) -> None:
        if self._fails:
            raise RuntimeError(self._name)
        self._events.append(f"+{self._name}")

    async def stop(self) -> None:
        self._events.append(f"-{self._name}")


async def test_services_stop_in_the_opposite_order() -> None:
    """The socket opens last and closes first, the store the other way round."""
    events: list[str] = []
    stack = ServiceStack([Part("store", events), Part("server", events)])

    await stack.start()
    await stack.stop()
    await stack.stop()

    assert events == ["+store", "+server", "-server", "-store"]


async def test_a_failed_start_stops_what_ran() -> None:
    """A port that is taken must not leave the directory locked."""
    events: list[str] = []
    stack = ServiceStack([Part("store", events), Part("server", events, fails=True)])

    with pytest.raises(RuntimeError, match="server"):
        await stack.start()

    assert events == ["+store", "-store"]
