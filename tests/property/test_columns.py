"""Numbers written at once are those written one by one."""

from hypothesis import given
from hypothesis import strategies as st

from halfmq.store.format.columns import ones, progression


@given(first=st.integers(0, 2**62), step=st.integers(0, 2**40), count=st.integers(1, 600))
def test_a_progression_is_what_it_is_number_by_number(first: int, step: int, count: int) -> None:
    """And the number whose digits are all 1 has as many of them."""
    numbers = [first + step * place for place in range(count)]

    assert progression(first, step, count) == b"".join(one.to_bytes(8, "big") for one in numbers)
    assert ones(count).to_bytes(8 * count, "big") == (1).to_bytes(8, "big") * count
