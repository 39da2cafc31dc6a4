"""docs/compatibility.md says of every request whether it is served, and what clients can do."""

from __future__ import annotations

from halfmq.broker.handlers.admin.access import PlainAclHandlers, UserHandlers
from halfmq.broker.net.refused_codes import WITHOUT_ACCESS, remark_of
from tests.compatibility import DOCUMENT, written


def test_the_page_is_what_tests_router_and_reasons_say() -> None:
    """A reader can rely on which requests are served, and finds every request."""
    page = DOCUMENT.read_text(encoding="utf-8")

    assert page == written(page), "run: python -m tests.compatibility"


def test_a_row_that_is_missing_or_wrong_is_written() -> None:
    """The state comes from the broker and the tests; the notes of people stay."""
    page = DOCUMENT.read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| 34 |")]
    assert row == "| 34 | HEART_BEAT | served | |"

    assert written(page.replace(row + "\n", "")) == page
    assert written(page.replace(row, "| 34 | HEART_BEAT | refused | |")) == page
    noted = page.replace(row, "| 34 | HEART_BEAT | served | a note |")
    assert written(noted) == noted


def test_what_needs_access_control_is_served_with_it() -> None:
    """Without it, these requests are refused with the setting that is missing."""
    users = UserHandlers.handlers(UserHandlers.__new__(UserHandlers))
    accounts = PlainAclHandlers.handlers(PlainAclHandlers.__new__(PlainAclHandlers))

    assert users.keys() | accounts.keys() == WITHOUT_ACCESS.keys()


def test_the_answer_to_a_refused_request_says_why() -> None:
    """In RocketMQ's words first, by which tools know it; an unknown code has no reason."""
    assert remark_of(907) == (
        " request type 907 not supported: this broker is a master; halfmq ha status shows its slave"
    )
    assert "authenticationEnabled=true" in remark_of(3005)
    assert remark_of(9999) == " request type 9999 not supported"
