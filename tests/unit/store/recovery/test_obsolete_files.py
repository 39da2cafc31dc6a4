"""A store of an earlier version opens; what that version alone used goes, or keeps its meaning."""

from pathlib import Path

import pytest

from tests.support.stopped_stores import filled, open_store


def test_the_reserve_of_an_earlier_version_is_removed(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It held space back, which a start may need; beside a log on another disk as well."""
    caplog.set_level("INFO", "halfmq")
    reserves = [root / "halfmqReserve", root / "commitlog" / "halfmq" / "halfmqReserve"]
    for reserve in reserves:
        reserve.parent.mkdir(parents=True, exist_ok=True)
        reserve.write_bytes(bytes(4096))

    store, _ = open_store(root)
    store.close()

    assert not any(reserve.exists() for reserve in reserves)
    for reserve in reserves:
        assert f"event=leftover_removed path={reserve} bytes=4096" in caplog.text


@pytest.mark.parametrize("name", ["consumequeue.doubtful", "digests/consumequeue.suspect"])
def test_queues_that_an_earlier_version_marked_for_a_rebuild_are_rebuilt(
    root: Path, name: str
) -> None:
    """The marker had another name, or lay in another place."""
    filled(root)
    (root / name).touch()

    for rebuilt in (True, False):
        store, report = open_store(root)
        store.close()
        assert report.queues_rebuilt is rebuilt
    assert not (root / name).exists()
