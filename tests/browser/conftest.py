"""One browser for all tests of a file; where there is none they are skipped, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browser import BrowserMissingError, Page, Pipe, browser, new_page


@pytest.fixture(scope="module")  # not for longer: it holds hundreds of megabytes
def chromium() -> Iterator[Pipe]:
    try:
        with browser() as started:
            yield started
    except BrowserMissingError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def tab(chromium: Pipe) -> Iterator[Page]:
    with new_page(chromium) as page:
        yield page
