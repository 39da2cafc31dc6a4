"""The session that every test here shares; the audit command uses it too, as the active one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.support.spark import session


@pytest.fixture(scope="session", autouse=True)
def spark() -> Iterator[SparkSession]:
    with session() as started:
        yield started
