"""Final messages kept for decisions that come at once."""

from halfmq.broker.transaction.recent import RecentFinals
from tests.support.transactions import message


def test_a_final_message_is_taken_once() -> None:
    """The transaction is decided then; a repeat is answered from elsewhere."""
    recent = RecentFinals()
    final = message()
    recent.add(4096, final)

    assert recent.take(0) is None
    assert recent.take(4096) is final
    assert recent.take(4096) is None


def test_memory_is_bounded_and_the_latest_are_kept() -> None:
    """Old ones are dropped in bulk; each that was added last is there."""
    recent = RecentFinals(bytes_max=20_000)
    for offset in range(1_000):
        recent.add(offset, message(body=b"x" * 1_000))
        assert sum(map(len, (recent._young, recent._old))) <= 20
    assert [recent.take(offset) is not None for offset in (0, 990, 999)] == [False, True, True]
